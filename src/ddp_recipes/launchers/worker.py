"""One rank of a job, in a process that was started for it, its side of the pipes to its launcher, and its report."""

import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from queue import SimpleQueue
from typing import IO, TYPE_CHECKING, Literal, NoReturn

from ddp_recipes.errors import Left, Preempted, RecipeError, RequestError, RunFailed
from ddp_recipes.reporting.run_directory import Summary
from ddp_recipes.runtime.job import ASKS_TO_STOP, ExitRequest, Job, Loss, Regroup, Watcher
from ddp_recipes.runtime.process import die_with_parent, ignore, ignore_broken_pipe, leave, loading, set_name
from ddp_recipes.runtime.world import World

if TYPE_CHECKING:
    from ddp_recipes.runtime.messages import Messages


_EXIT_CODES = {
    "summary": 0,
    "refused": RequestError.exit_status,
    "preempted": Preempted.exit_status,
    "failed": RunFailed.exit_status,
    "left": Left.exit_status,
}


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """How a job ended on one rank.

    Attributes:
        kind: ``summary`` if it finished.
        message: the error; of a failure the traceback, if it has one.
        checkpoint: where a preempted run resumes.
        cause: whether the rank failed by itself, not because another one did.
        unresponsive: ranks that no longer responded to it: there is no point in waiting for them.
        time: when it ended, in seconds since the epoch.
        summary: of the run, on this rank.
    """

    rank: int
    kind: Literal["summary", "refused", "preempted", "failed", "left"]
    message: str = ""
    checkpoint: str | None = None
    cause: bool = True
    unresponsive: tuple[int, ...] = ()
    time: float = 0.0
    summary: Summary | None = None

    @property
    def exit_status(self) -> int:
        """The exit code of the rank's process."""
        return _EXIT_CODES[self.kind]

    @classmethod
    def of_error(cls, rank: int, error: BaseException) -> "RankReport":
        """Return the report of a rank that raised."""
        kinds: list[tuple[type[RecipeError], Literal["refused", "preempted", "left"]]]
        kinds = [(RequestError, "refused"), (Preempted, "preempted"), (Left, "left")]
        return cls(
            rank=rank,
            kind=next((kind for raised, kind in kinds if isinstance(error, raised)), "failed"),
            message=str(error) if isinstance(error, RecipeError) else "".join(traceback.format_exception(error)),
            checkpoint=error.checkpoint if isinstance(error, Preempted) else None,
            cause=not isinstance(error, RunFailed) or error.rank in (None, rank),
            unresponsive=tuple(error.unresponsive) if isinstance(error, RunFailed) else (),
            time=time.time(),
        )

    def to_json(self) -> str:
        """Return the report as one line of text."""
        return json.dumps(vars(self))

    @classmethod
    def from_json(cls, text: str) -> "RankReport":
        """Return the report that :meth:`to_json` wrote.

        Raises:
            ValueError: it is none.
        """
        values = json.loads(text)
        try:
            report = cls(**{**values, "unresponsive": tuple(values["unresponsive"])})
            kinds = {"rank": int, "message": str, "checkpoint": str | None, "time": float | int, "summary": dict | None}
            if report.kind in _EXIT_CODES and all(isinstance(getattr(report, name), kinds[name]) for name in kinds):
                return report
        except (TypeError, KeyError):
            pass
        raise ValueError(f"no report of a rank: {text[:200]}")


def write_at_death(file: int) -> None:
    """Have this process write the stacks of all its threads to a file descriptor, and die, when it gets SIGUSR2."""
    faulthandler.register(signal.SIGUSR2, file, all_threads=True, chain=True)  # on to the default, which is to die


class LauncherConnection:
    """Receives the launcher's messages, a line each; its end is the launcher's end, and this process's.

    Args:
        pipe: to read from.
        send: sends the launcher a line.
    """

    def __init__(self, pipe: IO[bytes], send: Callable[[str], None]) -> None:
        self._pipe, self._send = pipe, send
        self._answers: SimpleQueue[Regroup | ExitRequest | None] = SimpleQueue()
        self._exited: set[int] = set()
        self._moves = False
        self._lost = False  # whether a rank is, since all last met
        self._when_lost: Callable[[], None] = lambda: None
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        """Read to the end, whatever ended the launcher."""
        for line in self._pipe:
            message = json.loads(line)
            if "exited" in message:
                self._exited, self._lost = {*message["exited"]}, True
                self._when_lost()  # what it aborts has ended before the next message is read
            elif "move" in message:
                self._moves = True
            elif "leave" in message:
                self._answers.put(ExitRequest(message["leave"]))
            else:
                self._exited, self._lost = set(), False
                self._answers.put(None if message["regroup"] is None else Regroup.of(message["regroup"]))
        os._exit(1)

    @property
    def watcher(self) -> Watcher:
        """The functions that the rank calls to watch the others and to report to the launcher."""
        return Watcher(
            exited=lambda: self._exited,
            joined=lambda: self._send(json.dumps({"joined": True})),
            reported=lambda losses: self._send(json.dumps({"reported": losses})),
            request=self._request,
            when_lost=self._call_when_lost,
            moves=lambda: self._moves,
        )

    def _call_when_lost(self, call: Callable[[], None]) -> None:
        """Have another thread call this once a rank is lost; one that is already is no exception."""
        self._when_lost = call
        if self._lost:
            call()

    def _request(self, loss: Loss) -> "tuple[Regroup, Messages] | ExitRequest | None":
        """Report a loss to the launcher, and wait for its message: where ranks regroup, or that they do not."""
        from ddp_recipes.runtime.messages import in_file

        self._send(loss.to_json())
        regroup = self._answers.get()
        if isinstance(regroup, Regroup):
            return regroup, in_file(os.open(regroup.file, os.O_RDWR))
        return regroup


FIRSTS = "DDP_RECIPES_FIRST_RANKS"  # of each node, where they may hold unequal numbers
STORE_TIMEOUT = timedelta(minutes=5)  # for rank 0 to load torch


def work(connection: int, reports: int, stacks: int, store_file: int | None = None) -> NoReturn:
    """Read a job, run it as a local rank, report how it ended, and exit.

    Args:
        connection: pipe that brings the job, one line, then the launcher's messages; its end is the launcher's end.
        reports: pipe for what the rank says, and for the report, a line each.
        stacks: file for the Python stacks when SIGUSR2 ends it.
        store_file: file that the ranks' store is in; without one they are on several nodes.
    """
    die_with_parent()
    ignore_broken_pipe()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    rank, size, local_rank, local_size, node = (int(os.environ.get(name, 0)) for name in names)
    firsts = os.environ.get(FIRSTS, "") if store_file is None else ""  # else another run's, which this is started from
    world = World(rank, size, local_rank, local_size, node, tuple(map(int, firsts.split())))
    set_name(f"rank {world.rank}")
    write_at_death(stacks)
    pipe = os.fdopen(connection, "rb")
    job = replace(Job.from_json(pipe.readline().decode()), last=True)
    with os.fdopen(reports, "w", buffering=1) as file:
        report = run(job, world, store_file, LauncherConnection(pipe, lambda line: print(line, file=file)))
        ignore(ASKS_TO_STOP)  # the run has ended
        sys.stdout.flush()
        sys.stderr.flush()
        print(report.to_json(), file=file)
    leave(report.exit_status)


def run(job: Job, world: World, store_file: int | None, connection: LauncherConnection | None = None) -> RankReport:
    """Run the job as one of its ranks; return how it ended.

    Args:
        store_file: file, of no name, that the ranks have in common and meet in; without one they meet at
            ``MASTER_ADDR:MASTER_PORT``, and a key proves who they are.
        connection: to the launcher, where that is this process's parent.
    """
    try:
        with loading():  # the first import of torch: errors in it are reported, too
            from ddp_recipes import rank
            from ddp_recipes.runtime.messages import in_file

            if store_file is None:
                from ddp_recipes.launchers.store import at_address

        messages = at_address(world, os.environ, STORE_TIMEOUT) if store_file is None else in_file(store_file)
        watcher = Watcher() if connection is None else connection.watcher
        summary = rank.run(job, world, messages, watcher)
        return RankReport(rank=world.rank, kind="summary", summary=summary)
    except BaseException as error:  # noqa: BLE001 - whatever ends a rank is reported
        return RankReport.of_error(world.rank, error)
