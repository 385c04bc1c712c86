"""What a rank knows from whoever started it, and says to it, while it runs. Loads no torch."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddp_recipes.runtime.meeting import Leaving, Loss, Meeting

if TYPE_CHECKING:
    from ddp_recipes.runtime.messages import Messages


@dataclass(frozen=True)
class Watcher:
    """By default, nobody watches.

    Attributes:
        exited: returns the ranks whose process is known to have exited, which need not be waited for.
        joined: called once this rank has joined the others, and has the state that they have.
        reported: called with how many losses are reported to the user.
        ask: tells of a loss, and waits; returns where ranks meet again, that all leave, or that the run ends: ``None``.
        when_lost: takes what another thread calls once a rank is lost.
        moves: returns whether all are to leave after a step, for others to go on.
    """

    exited: Callable[[], Iterable[int]] = tuple
    joined: Callable[[], None] = lambda: None
    reported: Callable[[int], None] = lambda number: None
    ask: Callable[[Loss], "tuple[Meeting, Messages] | Leaving | None"] = lambda loss: None
    when_lost: Callable[[Callable[[], None]], None] = lambda call: None
    moves: Callable[[], bool] = lambda: False
