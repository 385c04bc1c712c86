"""Starts one process a rank on this machine, supervises them, and ends them all."""

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, ClassVar, Literal

from ddp_recipes.config.parallelism import strategy_settings
from ddp_recipes.config.request import Request
from ddp_recipes.config.settings import LauncherSettings
from ddp_recipes.devices import visible
from ddp_recipes.errors import RunFailed
from ddp_recipes.launchers import stacks
from ddp_recipes.launchers.base import Resources
from ddp_recipes.launchers.local.ranks import Rank, Starter, incoming
from ddp_recipes.launchers.reports import Death, Outcome, as_rank_0, decide
from ddp_recipes.recovery.replacement import Replacement
from ddp_recipes.reporting.run_directory import Summary, leave_trace
from ddp_recipes.runtime.job import ASKS_TO_STOP, Job
from ddp_recipes.runtime.meeting import Meeting
from ddp_recipes.runtime.process import ignore_once, loading
from ddp_recipes.runtime.world import World

if TYPE_CHECKING:
    from ddp_recipes.recovery.memory import Places

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
        """Run a job and return rank 0's summary."""
        self.resources.refuse_started_ranks("local")
        request, most = Request.of(job.config), self.settings.max_restarts
        processes = request.processes(visible(self.settings.device))
        if processes == 1 and not most + self.settings.replace_ranks:
            self.resources.server.close()
            return run_here(job)
        server = self.resources.server if self.settings.start_method == "forkserver" else None
        restarts, spare, origin = 0, self.settings.replace_ranks, job
        seen: set[str] = set()  # failures, which come again if they are not by chance
        known: list[tuple[str, float]] = []  # why ranks were lost, and when
        reported = 0  # of those, to the user
        parts = strategy_settings(job.config["strategy"]).layout(processes).parts
        with signals_caught(job.last) as signals, ExitStack() as memory:
            keeps = job.config["checkpoint"].get("in_memory_every_n_steps")
            places = _places(parts, memory) if keeps else None
            while True:
                try:
                    with ExitStack() as stack:  # ends ranks that hang once the failure is written
                        starter = Starter(job, processes, server, stack, places)
                        hung = partial(end_with_stacks, job)
                        replacement = Replacement(starter, spare, parts, self.settings.timeout_s, hung, known, reported)
                        return _supervise(job, starter.all(), signals, replacement).conclude(job)
                except RunFailed as error:
                    spare -= replacement.number
                    if untold := replacement.untold:
                        print(*untold, sep="\n", file=sys.stderr, flush=True)
                    if signals or (restarts == most and (spare <= 0 or replacement.again or str(error) in seen)):
                        raise
                    seen.add(str(error))
                    reported = replacement.reported
                    job, whence = _restarted(origin, processes, places, known, reported, str(error))
                    reported = reported if known else 0
                    if restarts < most:
                        restarts += 1
                        line = f"Restart {restarts} of {most}, from {whence}."
                    else:
                        spare -= 1
                        line = f"No rank has all that the lost one had: all start again, from {whence}."
                    print(error, line, sep="\n", file=sys.stderr, flush=True)


def _places(parts: int, memory: ExitStack) -> "Places":
    """Return where ranks keep their states beside checkpoints, until the stack ends."""
    from ddp_recipes.recovery.memory import Places

    return Places.made(parts, memory)


def _restarted(
    job: Job, processes: int, places: "Places | None", known: list[tuple[str, float]], reported: int, error: str
) -> tuple[Job, str]:
    """Return the job as all ranks start it again, and from what: the newer of a checkpoint and what is in memory.

    Args:
        known: of ranks that were lost, which is added to where memory knows of those before.
        reported: of those, to the user.
    """
    newest = None if places is None else places.newest()
    if newest is None or newest[0] <= job.saved_step:
        known.clear()  # what they came to is in summary.json
        return job.resumed(), "the last checkpoint" if job.saved_step >= 0 else "step 0"
    step, states = newest
    known.append((error.splitlines()[0], time.time()))
    why, since = zip(*known, strict=True)
    meeting = Meeting("", tuple(range(len(states))), tuple(range(processes)), why, since, reported, states)
    return replace(job, meeting=asdict(meeting)), f"step {step}, which is in memory"


def run_here(job: Job) -> Summary:
    """Run a job as the one rank that it has, in this very process."""
    with as_rank_0():
        with loading():
            from ddp_recipes import rank

        return rank.run(job, World(), None)


def _supervise(job: Job, ranks: list[Rank], signals: Sequence[str], replacement: Replacement) -> Outcome:
    """Wait for the ranks, signal them, give the others a while if one of them fails; return what became of the run.

    Args:
        signals: names of those that this process gets, also while this waits.
    """
    timeout_s = float(job.config["launcher"]["timeout_s"])
    strategy = strategy_settings(job.config["strategy"])
    outlives = strategy.outlives
    deadline = closed = float("inf")  # when all ranks have to have ended
    first, signalled, replaces = [*ranks], False, 0 < replacement.parts < len(ranks) and replacement.most > 0
    told: list[Rank] = []  # of the signal
    for _ in incoming(ranks):
        if signals.count("SIGINT") > 1:
            return Outcome(KeyboardInterrupt(), "interrupted by the keyboard, twice")
        if signals and not signalled:
            signalled = True
            deadline = time.monotonic() + (AFTER_INTERRUPT_S if signals[0] == "SIGINT" else AFTER_TERM_S)
        if signalled and not any(rank in told for rank in ranks):  # yet, or any more
            told = [rank for rank in ranks if rank.began or rank in first]  # others take a lost one's place
            for rank in told:
                rank.process.send_signal(signal.SIGTERM)
        if replaces and time.monotonic() < deadline and replacement.goes_on(ranks):  # and saves, if it is to stop
            continue
        reports = {rank.number: rank.report for rank in ranks if rank.report is not None}
        deaths = _deaths(ranks, outlives)
        failed = deaths or any(report.kind != "summary" for report in reports.values())
        if failed and deadline == float("inf"):
            deadline = time.monotonic() + AFTER_FAILURE_S
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
    return decide(reports, deaths, killed=[rank.number for rank in stopped or stuck], signals=signals)


def _deaths(ranks: Sequence[Rank], outlives: Callable[[int], bool]) -> list[Death]:
    """Return the deaths that end the run."""
    deaths = [(rank, rank.death) for rank in ranks]
    return [death for rank, death in deaths if death and not (rank.joined and outlives(rank.number))]


def end_with_stacks(job: Job, stuck: Sequence[Rank]) -> None:
    """End ranks that hang, and write their stacks to ``ranks/``."""
    by_process = {rank.process.pid: rank for rank in stuck if rank.process.pid is not None}
    for pid, text in stacks.request({pid: rank.stacks for pid, rank in by_process.items()}).items():
        leave_trace(job.directory, by_process[pid].number, text)


@contextmanager
def signals_caught(last: bool) -> Iterator[list[str]]:
    """Collect the signals that request a stop, by name and in order, instead of dying of them; in the main thread only.

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
