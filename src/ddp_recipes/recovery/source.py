"""From what a run goes on once ranks are lost: a state of ranks that live, or one in memory. Loads no torch."""

from collections.abc import Iterable
from typing import Any, Generic, NamedTuple, TypeVar

Point = TypeVar("Point", bound=Any)
Place = TypeVar("Place")


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
