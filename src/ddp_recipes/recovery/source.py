"""From what a run goes on once ranks are lost: a state of ranks that live, or one in memory. Loads no torch.

And the clock by which all of its processes say when that was.
"""

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, TypeVar

Point = TypeVar("Point", bound=Any)
Place = TypeVar("Place")

CLOCK_AHEAD = "DDP_RECIPES_CLOCK_AHEAD_S"  # what a run's clock shows more than this machine's own


def moment() -> float:
    """Return the seconds by the clock that all processes of a run share, which setting the date does not move.

    It is the machine's own, which counts from its start, and so starts elsewhere on each: see :func:`clock_of_nodes`.
    """
    return time.monotonic() + ahead_s()


def ahead_s() -> float:
    """Return how many seconds :func:`moment` is ahead of the machine's own clock."""
    return float(os.environ.get(CLOCK_AHEAD, 0.0))


@contextmanager
def clock_of_nodes() -> Iterator[None]:
    """Have this process, and those that it starts, take the time from the date that it is now, which nodes share."""
    os.environ[CLOCK_AHEAD] = str(time.time() - time.monotonic())
    try:
        yield
    finally:
        del os.environ[CLOCK_AHEAD]


class Progress(NamedTuple):
    """How far a rank has come; the one that is furthest gives the others its state.

    Attributes:
        step: optimizer steps that are done.
        after: how much of what follows a step is done: 0, 1 validation and schedules, 2 a checkpoint that was due, too.
    """

    step: int
    after: int


class Candidate(NamedTuple, Generic[Point, Place]):
    """A state of one part of the model, and where it is.

    Attributes:
        point: how far it has come; the furthest counts, and states of different points do not go together.
        part: of the model.
        parts: how many make up the model.
        place: the rank, or the file, that has it.
    """

    point: Point
    part: int
    parts: int
    place: Place


class Source(NamedTuple, Generic[Point, Place]):
    """What all ranks go on from.

    Attributes:
        point: that all parts of the model have come to.
        places: of each part, in their order.
    """

    point: Point
    places: tuple[Place, ...]


def furthest(states: Iterable[Candidate[Point, Place]]) -> Source[Point, Place] | None:
    """Return the furthest point of which every part of the model is somewhere; ``None`` where there is none.

    Args:
        states: all that there are. Of several of one part and point the first counts.
    """
    found: dict[tuple[Point, int], dict[int, Place]] = {}
    for point, part, parts, place in states:
        found.setdefault((point, parts), {}).setdefault(part, place)
    whole = [(point, parts) for (point, parts), places in found.items() if len(places) == parts]
    if not whole:
        return None
    point, parts = max(whole)
    return Source(point, tuple(found[point, parts][part] for part in range(parts)))
