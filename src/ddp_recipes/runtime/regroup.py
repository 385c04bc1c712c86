"""What a rank and whoever started it report to each other, and where ranks regroup after a loss. Loads no torch."""

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from ddp_recipes.runtime.messages import Messages


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
class ExitRequest:
    """The message that ranks do not regroup: all exit, and others go on.

    Attributes:
        keep: whether this rank leaves its state in memory.
    """

    keep: bool


@dataclass(frozen=True)
class Regroup:
    """The address where ranks form a new group, and the ranks whose state they go on with.

    Attributes:
        file: of the store, as a path that any process of this user can open.
        sources: of each part of the model the rank whose state all go on with that hold it.
        lost: ranks that are replaced.
        why: how each rank was lost that is replaced in this run, a line each: these, and those before them.
        since: the :func:`moment` at which each loss was noticed.
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
    def of(cls, values: Mapping[str, Any]) -> "Regroup":
        """Return the one whose fields came as JSON."""
        made: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in values.items()}
        return cls(**made)


@dataclass(frozen=True)
class Watcher:
    """By default, nobody watches.

    Attributes:
        exited: returns the ranks whose process is known to have exited, which need not be waited for.
        joined: called once this rank has joined the others, and has the state that they have.
        reported: called with how many losses are reported to the user.
        request: reports a loss, and waits; returns where ranks regroup, that all exit, or that the run ends: ``None``.
        when_lost: takes what another thread calls once a rank is lost.
        moves: returns whether all are to leave after a step, for others to go on.
    """

    exited: Callable[[], Iterable[int]] = tuple
    joined: Callable[[], None] = lambda: None
    reported: Callable[[int], None] = lambda number: None
    request: Callable[[Loss], "tuple[Regroup, Messages] | ExitRequest | None"] = lambda loss: None
    when_lost: Callable[[Callable[[], None]], None] = lambda call: None
    moves: Callable[[], bool] = lambda: False
