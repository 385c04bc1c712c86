"""What became of a run, by what each rank reports at its end: decided alike for all launchers. Loads no torch."""

import os
import signal
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO

from ddp_recipes.errors import Preempted, RecipeError, RequestError, RunFailed
from ddp_recipes.launchers.worker import RankReport
from ddp_recipes.reporting.run_directory import Summary, leave_failure
from ddp_recipes.runtime.job import Job
from ddp_recipes.runtime.process import is_running


@dataclass(frozen=True)
class Death:
    """A rank whose process exited without a report.

    Attributes:
        message: names the rank, and how it exited; ``summary.json`` gets its first line.
        asked: whether of SIGTERM, by which a launcher asks a rank to stop, and which kills one that has not begun.
    """

    rank: int
    message: str
    asked: bool = False


def died(who: str, status: int) -> str:
    """Return how a process exited that left no report: in a line, and what may help in another."""
    how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with exit code {status}"
    out_of_memory = "\nIf nobody killed it, memory ran out (dmesg shows it): lower data.batch_size or num_workers."
    return f"{who} {how}, without a traceback.{out_of_memory if status == -signal.SIGKILL else ''}"


@dataclass(frozen=True)
class Outcome:
    """What became of a run.

    Attributes:
        result: rank 0's summary, or the error to raise.
        line: the error for ``summary.json``, if rank 0 has not written it; empty if there is nothing to add.
        known_better: whether the line replaces what rank 0 wrote, which saw no more than a consequence.
    """

    result: Summary | BaseException
    line: str = ""
    known_better: bool = False

    def conclude(self, job: Job) -> Summary:
        """Write what ended a run into its directory; return the summary, or raise the error."""
        if self.line:
            status = "preempted" if isinstance(self.result, Preempted) else "failed"
            leave_failure(job.directory, job.overrides, self.line, self.known_better, status)
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


def decide(
    reports: Mapping[int, RankReport],
    deaths: Sequence[Death] = (),
    *,
    killed: Sequence[int] = (),
    signals: Sequence[str] = (),
    otherwise: str = "Rank 0 exited without a report.",
) -> Outcome:
    """Return what became of a run: the one error that ended it, or rank 0's summary.

    Args:
        reports: of ranks that sent one, by rank.
        deaths: ranks whose process exited without a report, in the order in which they are to be named.
        killed: ranks that did not end, and that the launcher killed.
        signals: names of the signals that the launcher got, the first one first.
        otherwise: the message where rank 0 has no summary, and nothing else explains that.
    """
    refused, preempted, failed = (
        [reports[rank] for rank in sorted(reports) if reports[rank].kind == kind]
        for kind in ("refused", "preempted", "failed")
    )
    if refused:
        return Outcome(RequestError(refused[0].message))
    asked = any(death.asked for death in deaths)  # then others may have failed for the want of that rank
    if signals and not preempted and (asked or (not failed and (deaths or killed))):
        why = f"stopped by {signals[0]} before a checkpoint was saved"
        return Outcome(KeyboardInterrupt(why), why)
    if preempted and not deaths:
        message, line = preempted[0].message, ""
        if signals:  # a launcher sends SIGTERM to its ranks, whichever it got
            message = line = message.replace("SIGTERM", signals[0].replace("SIGINT", "Ctrl-C"), 1)
        return Outcome(Preempted(message, checkpoint=preempted[0].checkpoint), line, known_better=True)
    if deaths:
        death = deaths[0]
        return Outcome(RunFailed(death.message, rank=death.rank), death.message.splitlines()[0], known_better=True)
    unresponsive = f"Rank {', '.join(map(str, killed))} did not respond and was killed."
    if failed:
        return _failed(failed, unresponsive if killed else "")
    if killed:
        return Outcome(RunFailed(unresponsive, rank=killed[0]), unresponsive, known_better=True)
    if 0 in reports and (summary := reports[0].summary) is not None:
        return Outcome(summary)
    return Outcome(RunFailed(otherwise), otherwise.splitlines()[0])


def _failed(failed: Sequence[RankReport], unresponsive: str) -> Outcome:
    """Return the failure that came first, of those that another rank's did not cause."""
    first = min(failed, key=lambda report: (not report.cause, report.time))
    text = first.message.rstrip()
    last = text.rpartition("\n")[2]
    line, message = f"rank {first.rank}: {last}", f"Rank {first.rank} failed:\n{text}"
    if unresponsive and "did not respond" not in message:  # rank 0 held the store, or the backend aborted
        line, message = f"{line} {unresponsive}", f"{message}\n{unresponsive}"
    return Outcome(RunFailed(message, rank=first.rank), line, known_better=bool(unresponsive))


@contextmanager
def as_rank_0() -> Iterator[None]:
    """Run rank 0 in this very process: what it raises becomes the failure of that rank.

    Raises:
        RunFailed: with the traceback; errors of our own stay as they are.
    """
    try:
        yield
    except RecipeError:
        raise
    except Exception as error:
        text = "".join(traceback.format_exception(error)).rstrip()
        raise RunFailed(f"Rank 0 failed:\n{text}", rank=0) from error


ANSWER_S = 1.0


def request(processes: Mapping[int, IO[bytes]]) -> dict[int, str]:
    """End processes; return what is in the file of each once they are dead, or a second after it last became longer.

    A stopped process is continued for that, since it takes no signal before, and comes to nothing else.
    """
    for pid in processes:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR2)
            os.kill(pid, signal.SIGCONT)
    written, deadline = 0, time.monotonic() + ANSWER_S
    while any(map(is_running, processes)) and time.monotonic() < deadline:
        time.sleep(0.02)
        if (size := sum(os.fstat(file.fileno()).st_size for file in processes.values())) != written:
            written, deadline = size, time.monotonic() + ANSWER_S
    for file in processes.values():
        file.seek(0)
    return {pid: file.read().decode(errors="replace") for pid, file in processes.items()}
