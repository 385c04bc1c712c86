"""Starts one process a rank on this machine, and ends them all."""

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
from ddp_recipes.launchers.local.ranks import start
from ddp_recipes.launchers.local.supervisor import supervise
from ddp_recipes.launchers.reports import as_rank_0
from ddp_recipes.reporting.run_directory import Summary
from ddp_recipes.runtime.job import ASKS_TO_STOP, Job
from ddp_recipes.runtime.process import ignore_once, loading
from ddp_recipes.runtime.world import World


@dataclass(frozen=True, kw_only=True)
class LocalSettings(LauncherSettings):
    """``launcher.*`` of ``launcher=local``."""

    name: Literal["local"]


@dataclass(frozen=True)
class LocalLauncher:
    """Runs a job in as many processes as the config requests, or in this one if it is one and is not to be restarted.

    After a failure all ranks are started again from the last checkpoint, up to ``launcher.max_restarts`` times.
    """

    settings_class: ClassVar[type[LauncherSettings]] = LocalSettings
    settings: LauncherSettings
    resources: Resources

    def launch(self, job: Job) -> Summary:
        """Run a job and return rank 0's summary."""
        self.resources.refuse_started_ranks("local")
        processes, most = Request.of(job.config).processes(visible_gpus()), self.settings.max_restarts
        if processes == 1 and not most:
            self.resources.server.close()
            return run_here(job)
        server = self.resources.server if self.settings.start_method == "forkserver" else None
        restarts = 0
        with _signals_caught(job.last) as signals:
            while True:
                try:
                    with ExitStack() as stack:  # ends ranks that hang once the failure is written
                        return supervise(job, start(job, processes, server, stack), signals).conclude(job)
                except RunFailed as error:
                    if signals or restarts == most:
                        raise
                    restarts += 1
                    line = f"Restart {restarts} of {most}, from the last checkpoint."
                    print(error, line, sep="\n", file=sys.stderr, flush=True)
                    job = job.resumed()


def run_here(job: Job) -> Summary:
    """Run a job as the one rank that it has, in this very process."""
    with as_rank_0():
        with loading():
            from ddp_recipes import rank

        return rank.run(job, World(), None)


@contextmanager
def _signals_caught(last: bool) -> Iterator[list[str]]:
    """Collect SIGINT, SIGTERM and SIGUSR1, by name and in order, instead of dying of them; in the main thread only.

    After the ``last`` job the process is about to exit, and they are ignored.
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
