"""From what a run goes on once ranks are lost: a table, without processes."""

import pytest

from ddp_recipes.recovery.source import Candidate, Progress, Source, furthest


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([], None),
        # A whole model on each rank: whoever is furthest, of several the first.
        ([(3, 0, 1, "rank 1"), (4, 0, 1, "rank 2"), (4, 0, 1, "rank 3")], (4, ("rank 2",))),
        # Two parts: the furthest point that both have come to, in the order of parts.
        ([(4, 1, 2, "rank 1"), (3, 0, 2, "rank 2"), (3, 1, 2, "rank 3")], (3, ("rank 2", "rank 3"))),
        ([(4, 1, 2, "rank 1"), (3, 0, 2, "rank 2")], None),
        ([(4, 1, 2, "rank 1"), (4, 1, 2, "rank 3")], None),
        # Parts of two starts, one with more ranks than the other, do not go together.
        ([(4, 0, 2, "a"), (4, 2, 3, "b"), (4, 1, 3, "c"), (3, 0, 1, "d")], (3, ("d",))),
        (
            [((4, "x"), 0, 2, "a"), ((4, "y"), 1, 2, "b"), ((3, "x"), 1, 2, "c"), ((3, "x"), 0, 2, "d")],
            ((3, "x"), ("d", "c")),
        ),
        # A step counts more than what follows it.
        ([(Progress(4, 0), 0, 1, "a"), (Progress(3, 2), 0, 1, "b")], (Progress(4, 0), ("a",))),
        ([(Progress(4, 0), 0, 1, "a"), (Progress(4, 1), 0, 1, "b")], (Progress(4, 1), ("b",))),
    ],
)
def test_the_furthest_state_of_which_every_part_is_somewhere(
    states: list[tuple[object, int, int, str]], expected: tuple[object, tuple[str, ...]] | None
) -> None:
    assert furthest(Candidate(*state) for state in states) == (None if expected is None else Source(*expected))
