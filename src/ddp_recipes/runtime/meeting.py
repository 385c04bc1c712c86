"""A rank is lost while others train: what they say of it, and where they meet again. Loads no torch."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple


class Progress(NamedTuple):
    """How far a rank has come; the one that is furthest gives the others its state.

    Attributes:
        step: optimizer steps that are done.
        after: how much of what follows a step is done: 0, 1 validation and schedules, 2 a checkpoint that was due, too.
    """

    step: int
    after: int


@dataclass(frozen=True)
class Loss:
    """A rank's message that it can no longer reach another one.

    Attributes:
        text: the error by which it noticed.
        alone: ranks that have what no other rank has, and so can neither be replaced nor be behind.
    """

    step: int
    after: int
    text: str
    alone: tuple[int, ...] = ()

    def to_json(self) -> str:
        """Return it as one line of text."""
        return json.dumps({"loss": asdict(self)})


@dataclass(frozen=True)
class Leaving:
    """The message that ranks do not form the group again: all end, and others go on.

    Attributes:
        keep: whether this rank leaves its state in memory.
    """

    keep: bool


@dataclass(frozen=True)
class Meeting:
    """The address where ranks form a new group, and the ranks whose state they go on with.

    Attributes:
        file: of the store, as a path that any process of this user can open.
        sources: of each part of the model the rank whose state all go on with that hold it.
        lost: ranks that are replaced.
        why: how each rank was lost that is replaced in this run, a line each: these, and those before them.
        since: when each loss was noticed, in seconds since the epoch.
        reported: how many of these losses are reported to the user.
        states: of each part of the model where its state is in memory, on this node or another, if all ranks are new.
    """

    file: str
    sources: tuple[int, ...]
    lost: tuple[int, ...]
    why: tuple[str, ...]
    since: tuple[float, ...]
    reported: int = 0
    states: tuple[str, ...] = ()

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Meeting":
        """Return the meeting whose fields came as JSON."""
        made: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in values.items()}
        return cls(**made)
