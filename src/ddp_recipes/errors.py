"""The exception tree. Every exception carries the exit status of the run that it ends.

RecipeError                 base of all, status 1
├── RequestError            the request was wrong: nothing was started, nothing was written; status 2
├── RunFailed               training failed on some rank; status 1
└── Preempted               a signal stopped the run after a checkpoint was saved; status 75
"""

import difflib
from collections.abc import Iterable, Iterator, Sequence

INTERRUPTED = 130  # the exit status of a KeyboardInterrupt
MAKE_KEY = (
    "Make one in the home folder, if all nodes share it: (umask 077; openssl rand -hex 32 > ~/.ddp_recipes_key). Else "
    "set DDP_RECIPES_KEY to the same secret for every rank."
)


class RecipeError(Exception):
    """Base of all exceptions that ``ddp_recipes`` raises on purpose."""

    exit_status = 1

    def _render_traceback_(self) -> list[str]:
        """Have IPython show the message alone, which says it all: a public name of IPython's."""
        return [f"{type(self).__name__}: {self}"]


class RequestError(RecipeError):
    """What was requested cannot be done; the message says what was given, what is allowed, what to do."""

    exit_status = 2


class Left(RecipeError):
    """A rank that ends for others to go on, in whatever number there are."""


class RunFailed(RecipeError):
    """A rank failed. The message is that rank's own traceback or, where there is none, how it exited.

    ``unresponsive`` are the ranks that no longer respond: there is no point in waiting for them.
    """

    def __init__(self, message: str, *, rank: int | None = None, unresponsive: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.rank = rank
        self.unresponsive = unresponsive


class Preempted(RecipeError):
    """A signal stopped the run; ``checkpoint`` is where it can resume."""

    exit_status = 75

    def __init__(self, message: str, *, checkpoint: str | None = None) -> None:
        super().__init__(message)
        self.checkpoint = checkpoint


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and all that it came of, causes before contexts, each once: some lead back to the first one."""
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending:
        if (each := pending.pop()) is not None and id(each) not in seen:
            seen.add(id(each))
            yield each
            pending += (each.__context__, each.__cause__)


def printable(text: object) -> str:
    """Return a text in which no control character but an end of line or a tab reaches a terminal: ``\\x1b[2J``."""
    shown = str(text)
    if shown.isprintable():
        return shown
    return "".join(
        one if one in "\n\t" or one.isprintable() else one.encode("unicode_escape").decode() for one in shown
    )


def did_not_arrive(ranks: Iterable[int], world_size: int, timeout_s: float) -> str:
    """Return the message on ranks that timed out at the start."""
    return (
        f"Rank {', '.join(map(str, sorted(ranks)))} of {world_size} did not arrive within launcher.timeout_s="
        f"{timeout_s:g} seconds. Look at what those processes printed."
    )


def did_not_end(ranks: Iterable[int], world_size: int, timeout_s: float) -> str:
    """Return the message on ranks that the others waited for at the end."""
    return (
        f"Rank {', '.join(map(str, sorted(ranks)))} of {world_size} did not come to its end within launcher.timeout_s="
        f"{timeout_s:g} seconds of the others: stopped or stuck after the last step."
    )


def store_is_silent(seconds: float) -> str:
    """Return the message on a store that nobody can read, where none of the ranks has it."""
    how = f"has not answered for {seconds:.0f} seconds" if seconds < float("inf") else "has closed the connection"
    return (
        f"The store where ranks meet {how}: the process that has it, torchrun's agent on the node of MASTER_ADDR, is "
        f"stopped, stuck, gone or cut off."
    )


def exited_without_report(ranks: Iterable[int], world_size: int) -> str:
    """Return the message on ranks whose processes exited, by ``os._exit`` or a kill, while others waited for them."""
    return f"Rank {', '.join(map(str, sorted(ranks)))} of {world_size} exited without a report."


def nearest(given: object, allowed: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for the allowed name most like ``given``, or an empty string."""
    close = difflib.get_close_matches(str(given), [*map(str, allowed)], n=1, cutoff=0.5)
    return f" Did you mean '{close[0]}'?" if close else ""


def not_one_of(key: str, given: object, allowed: Iterable[str]) -> RequestError:
    """Return the error for a value that is not among the allowed ones, with the nearest of them."""
    names = sorted(allowed)
    return RequestError(f"{key}={given} is not known. Allowed: {', '.join(names)}.{nearest(str(given), names)}")
