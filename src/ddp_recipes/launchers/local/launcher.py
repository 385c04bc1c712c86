"""Starts one process a rank on this machine, supervises them, and ends them all."""

import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import ClassVar, Literal

from ddp_recipes.config.extras import extra
from ddp_recipes.config.parallelism import strategy_settings
from ddp_recipes.config.request import Request
from ddp_recipes.config.settings import LauncherSettings
from ddp_recipes.devices import visible
from ddp_recipes.errors import Preempted, RunFailed
from ddp_recipes.launchers import reports
from ddp_recipes.launchers.base import Resources
from ddp_recipes.launchers.local.ranks import Rank, Starter, Suspension, incoming, suspension
from ddp_recipes.launchers.reports import Death, Outcome, as_rank_0, decide
from ddp_recipes.reporting.run_directory import Summary, leave_trace
from ddp_recipes.runtime.job import ASKS_TO_STOP, Job
from ddp_recipes.runtime.process import handled_by, ignore_once, interrupted_by, loading, stops
from ddp_recipes.runtime.world import World

AFTER_FAILURE_S = 3.0  # for the other ranks to end by themselves, and for rank 0 to write its summary
AFTER_INTERRUPT_S = 6.0  # for a checkpoint after Ctrl-C
AFTER_TERM_S = 25.0  # for a checkpoint after another signal, within a scheduler's usual 30 s


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
        self.resources.refuse_started_ranks("local")
        request, most = Request.of(job.config), self.settings.max_restarts
        processes = request.processes(visible(self.settings.device))
        if processes == 1 and not most + self.settings.replace_ranks:
            self.resources.server.close()
            return run_here(job)
        server = self.resources.server if self.settings.start_method == "forkserver" else None
        recovers = self.settings.replace_ranks or job.config["checkpoint"].get("in_memory_every_n_steps")
        survival = extra("launcher.replace_ranks") if recovers else Survival
        with signals_caught(job.last) as signals, suspension() as suspended, ExitStack() as memory:
            ways: Survival = survival(job, self.settings, processes, memory)
            while True:
                try:
                    with ExitStack() as stack:  # ends ranks that hang once the failure is written
                        ranks = ways.start(Starter(ways.job, processes, server, stack))
                        return _supervise(ways.job, ranks, signals, suspended, ways.goes_on).conclude(ways.job)
                except RunFailed as error:
                    if (line := ways.after(str(error), bool(signals))) is None:
                        if signals and (most or recovers):
                            print(f"Nothing is started again: the run is to stop ({signals[0]}).", file=sys.stderr)
                        raise
                    print(error, line, sep="\n", file=sys.stderr, flush=True)


class Survival:
    """What is done about ranks that fail: all start again from the last checkpoint, so often as the config says.

    Recovery does more, in a subclass.

    Attributes:
        job: as the ranks begin with it, the next time as well.
        restarts: until now.

    Args:
        processes: that the job has.
        memory: keeps what is to outlive a start of the ranks.
    """

    def __init__(self, job: Job, settings: LauncherSettings, processes: int, memory: ExitStack) -> None:
        self.job, self.settings, self.processes = job, settings, processes
        self.restarts = 0

    def start(self, starter: Starter) -> list[Rank]:
        """Start all ranks."""
        return starter.all()

    def goes_on(self, ranks: list[Rank]) -> bool:
        """Whether the run goes on although ranks are lost; others may take their places in the list."""
        return False

    def after(self, error: str, stopped: bool) -> str | None:
        """Return how all ranks are started again after a failure, a line; ``None`` where they are not.

        Args:
            stopped: by a signal: the run is to end.
        """
        if stopped or self.restarts == self.settings.max_restarts:
            return None
        self.restarts += 1
        self.job, whence = self.job.resumed(), "the last checkpoint" if self.job.saved_step >= 0 else "step 0"
        return f"Restart {self.restarts} of {self.settings.max_restarts}, from {whence}."


def run_here(job: Job) -> Summary:
    """Run a job as the one rank that it has, in this very process."""
    with as_rank_0(), interrupted_by(ASKS_TO_STOP):
        with loading():
            from ddp_recipes import rank

        return rank.run(job, World(), None)


def _supervise(
    job: Job,
    ranks: list[Rank],
    signals: Sequence[str],
    suspended: Suspension,
    goes_on: Callable[[list[Rank]], bool],
) -> Outcome:
    """Wait for the ranks, signal them, give the others a while if one of them fails; return what became of the run.

    Args:
        signals: names of those that this process gets, also while this waits.
        goes_on: whether the run does although ranks are lost.
    """
    timeout_s = float(job.config["launcher"]["timeout_s"])
    strategy = strategy_settings(job.config["strategy"])
    outlives = strategy.outlives
    deadline = failing = closed = float("inf")  # when all ranks have to have ended
    first, signalled = [*ranks], False
    told: list[Rank] = []  # of the signal
    for _ in incoming(ranks):
        stood = suspended.of(ranks)
        deadline, failing, closed = deadline + stood, failing + stood, closed + stood
        if signals.count("SIGINT") > 1:
            return Outcome(KeyboardInterrupt(), "interrupted by the keyboard, twice")
        if signals and not signalled:
            signalled = True
            deadline = time.monotonic() + (AFTER_INTERRUPT_S if signals[0] == "SIGINT" else AFTER_TERM_S)
        if signalled and not any(rank in told for rank in ranks):  # yet, or any more
            told = [rank for rank in ranks if rank.began or rank in first]  # others take a lost one's place
            for rank in told:
                rank.process.send_signal(signal.SIGTERM)
        if signals and not any(rank.process.pid for rank in ranks):  # forked yet: torch is still being loaded
            deadline = time.monotonic()
        if time.monotonic() < deadline and goes_on(ranks):  # and saves, if it is to stop
            continue
        reports = {rank.number: rank.report for rank in ranks if rank.report is not None}
        deaths = _deaths(ranks, outlives)
        failed = deaths or any(report.kind != "summary" for report in reports.values())
        if failed:
            failing = min(failing, time.monotonic() + AFTER_FAILURE_S)
            if not (signalled and all(rank.joined for rank in ranks)):  # else they may be saving
                deadline = min(deadline, failing)
        elif reports and not failed:  # all ranks have come to their end: what is left is to close files
            closed = min(closed, time.monotonic() + timeout_s)
        unresponsive = {number for report in reports.values() for number in report.unresponsive}
        awaited = [rank for rank in ranks if not rank.over and rank.number not in unresponsive]
        if not awaited or time.monotonic() > min(deadline, closed):
            break
    stuck = [rank for rank in ranks if rank.report is None and not rank.over]
    deaths = _deaths(ranks, outlives)
    stopped = [rank for rank in stuck if rank.stopped]  # the others have been waiting for these, and were about to fail
    end_with_stacks(job, stuck)
    outcome = decide(reports, deaths, killed=[rank.number for rank in stopped or stuck], signals=signals)
    if isinstance(outcome.result, KeyboardInterrupt) and job.saved_step >= 0:
        return _of_checkpoint(job, signals[0], any(rank.began for rank in ranks))
    return outcome


def _of_checkpoint(job: Job, name: str, began: bool) -> Outcome:
    """Return what becomes of a run that is stopped without another checkpoint than those that it has.

    Args:
        began: whether it had gone on from the newest.
    """
    if began:
        why = f"stopped by {name} before another checkpoint was saved; the newest is of step {job.saved_step}"
        return Outcome(KeyboardInterrupt(why), why)
    message = (
        f"Stopped by {name.replace('SIGINT', 'Ctrl-C')} before it went on from step {job.saved_step}, where its newest "
        f"checkpoint is. To resume, start again with the same hydra.run.dir and ckpt_path=auto."
    )
    return Outcome(Preempted(message), message, known_better=job.goes_on)


def _deaths(ranks: Sequence[Rank], outlives: Callable[[int], bool]) -> list[Death]:
    """Return the deaths that end the run."""
    deaths = [(rank, rank.death) for rank in ranks]
    return [death for rank, death in deaths if death and not (rank.joined and outlives(rank.number))]


def end_with_stacks(job: Job, stuck: Sequence[Rank]) -> None:
    """End ranks that hang, and write their stacks to ``ranks/``."""
    by_process = {rank.process.pid: rank for rank in stuck if rank.process.pid is not None}
    for pid, text in reports.request({pid: rank.stacks for pid, rank in by_process.items()}).items():
        leave_trace(job.directory, by_process[pid].number, text)


@contextmanager
def signals_caught(last: bool) -> Iterator[list[str]]:
    """Collect the signals that request a stop, by name and in order, instead of dying of them; in the main thread only.

    After the ``last`` job the process is about to exit, and they are ignored.
    """
    caught: list[str] = []

    def note(number: int, frame: FrameType | None) -> None:
        for names in (caught, stops):
            names.append(signal.Signals(number).name)

    with handled_by(dict.fromkeys(ASKS_TO_STOP, note)):
        try:
            yield caught
        finally:
            if last:
                ignore_once(ASKS_TO_STOP)
