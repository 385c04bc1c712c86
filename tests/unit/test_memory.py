"""States in memory: one is whole or not there, whenever its writer died."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from ddp_recipes.recovery.memory import HEADER, SnapshotId, SnapshotSlots, least, snapshot_in, write_state


def written(path: str, step: int, *pieces: bytes, dies: bool = False) -> None:
    def each() -> Iterator[memoryview]:
        yield from map(memoryview, pieces)
        if dies:
            raise KeyboardInterrupt

    with open(path, "r+b") as file:
        write_state(file, SnapshotId(step), each())


def test_the_newest_step_that_every_part_has_is_found_and_a_torn_state_is_not() -> None:
    with ExitStack() as stack:
        slots = SnapshotSlots.made(2, stack)
        assert slots.newest() is None
        (first, second), (third, fourth) = slots.paths
        written(first, 3, b"abc", b"de")
        assert slots.newest() is None
        written(third, 3, b"x")
        written(second, 6, b"a longer one")
        assert slots.newest() == (3, (first, third))
        with pytest.raises(KeyboardInterrupt):
            written(fourth, 6, b"half of", dies=True)
        assert snapshot_in(fourth) is None
        assert slots.newest() == (3, (first, third))
        written(fourth, 6, b"all")
        assert slots.newest() == (6, (second, fourth))
        written(second, 9, b"short")
        assert Path(second).read_bytes()[HEADER.size :] == b"short"


def test_the_next_state_is_written_over_what_nobody_goes_on_from() -> None:
    with ExitStack() as stack:
        ((first, second),) = SnapshotSlots.made(1, stack).paths

        def kept(path: str, step: int, start: str) -> None:
            with open(path, "r+b") as file:
                write_state(file, SnapshotId(step, start=start), [b"a state"])

        kept(first, 6, "a")
        assert least([first, second], SnapshotId(9, start="a")) == second
        kept(second, 9, "a")
        assert least([first, second], SnapshotId(12, start="a")) == first
        assert least([first, second], SnapshotId(9, start="b")) == first
        assert least([first, second], SnapshotId(6, start="b")) == second  # not all parts were there of step 9
        kept(second, 6, "b")
        assert least([first, second], SnapshotId(9, start="b")) == first
