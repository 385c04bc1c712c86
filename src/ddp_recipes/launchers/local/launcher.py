"""Starts one process a replica on this machine, and sees to it that none is left."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import ClassVar, Literal

from ddp_recipes.config.request import Request, visible_gpus
from ddp_recipes.config.settings import LauncherSettings
from ddp_recipes.errors import RunFailed
from ddp_recipes.launchers.base import Resources
from ddp_recipes.launchers.fork_server import ForkServer
from ddp_recipes.launchers.local.ranks import start
from ddp_recipes.launchers.local.supervisor import supervise
from ddp_recipes.launchers.reports import as_rank_0
from ddp_recipes.reporting.run_directory import Summary
from ddp_recipes.runtime.job import ASKS_TO_STOP, Job
from ddp_recipes.runtime.process import ignore_once, loading


@dataclass(frozen=True, kw_only=True)
class LocalSettings(LauncherSettings):
    """``launcher.*`` of ``launcher=local``."""

    name: Literal["local"]


@dataclass(frozen=True)
class LocalLauncher:
    """Runs a job in as many processes as the config says, or in this one if it is one and is not to be restarted."""

    settings_class: ClassVar[type[LauncherSettings]] = LocalSettings
    settings: LauncherSettings
    resources: Resources

    def launch(self, job: Job) -> Summary:
        """Run a job and return rank 0's summary.

        Raises:
            RequestError, Preempted: as the ranks report.
            RunFailed: a rank raised or died; its traceback is the message.
            KeyboardInterrupt: interrupted twice, or before there was anything to save.
        """
        self.resources.refuse_started_ranks("local")
        processes = Request.of(job.config).processes(visible_gpus())
        if processes > 1 or self.settings.max_restarts:
            server = self.resources.server if self.settings.start_method == "forkserver" else None
            return _launch(job, processes, server, self.settings.max_restarts)
        self.resources.server.close()
        return run_here(job)


def run_here(job: Job) -> Summary:
    """Run a job as the one rank that it has, in this very process."""
    with as_rank_0():
        with loading():
            from ddp_recipes import rank
        from ddp_recipes.runtime.world import World

        return rank.run(job, World(), None)


def _launch(job: Job, processes: int, server: ForkServer | None, max_restarts: int) -> Summary:
    """Run a job in so many processes.

    Args:
        server: what forks the processes; without one each is started afresh.
        max_restarts: how often all ranks are started again, from the last checkpoint, after one of them failed.
    """
    with _signals_caught(job.last) as signals:
        for attempt in range(max_restarts):
            try:
                return _launch_once(job, processes, server, signals)
            except RunFailed as error:
                if signals:  # it was to end anyway
                    raise
                print(
                    f"{error}\nRestart {attempt + 1} of {max_restarts}, from the last checkpoint.",
                    file=sys.stderr,
                    flush=True,
                )
                job = job.resumed()
        return _launch_once(job, processes, server, signals)


def _launch_once(job: Job, processes: int, server: ForkServer | None, signals: list[str]) -> Summary:
    """Start the ranks and wait for them; the failure is written while those that hang are still there."""
    with ExitStack() as stack:
        return supervise(job, start(job, processes, server, stack), signals).conclude(job)


@contextmanager
def _signals_caught(last: bool) -> Iterator[list[str]]:
    """Collect SIGINT, SIGTERM and SIGUSR1, by name and in order, instead of dying of them; in the main thread only.

    Args:
        last: whether this process leaves after what is done meanwhile.
    """
    caught: list[str] = []

    def note(number: int, frame: FrameType | None) -> None:
        caught.append(signal.Signals(number).name)

    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    former = {number: signal.signal(number, note) for number in ASKS_TO_STOP}
    try:
        yield caught
    finally:
        if last:
            ignore_once(ASKS_TO_STOP)
        else:
            for number, handler in former.items():
                signal.signal(number, handler)
