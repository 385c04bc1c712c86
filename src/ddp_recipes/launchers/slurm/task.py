"""A Slurm job: its state, and one task of it, which is one rank and writes its report to ``slurm/``."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from ddp_recipes.launchers import environment, worker
from ddp_recipes.launchers.worker import RankReport
from ddp_recipes.reporting.run_directory import leave_failure_of_rank_0, write_text
from ddp_recipes.runtime.job import Job


def ask_slurm(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


@dataclass(frozen=True)
class State:
    """The state of a job, as Slurm's controller reports it."""

    name: str = ""
    reason: str = ""
    nodes: str = ""
    restarts: int = 0
    ended: bool = False

    def __str__(self) -> str:
        more = self.nodes if self.name == "RUNNING" else self.reason if self.name == "PENDING" else ""
        return f"{self.name.lower()}{f' ({more})' if more not in ('', 'None', '(null)') else ''}"

    @classmethod
    def ask(cls, number: str, former: "State") -> "State":
        """Ask the controller, which needs no accounting; it forgets a job minutes after its end."""
        answer = ask_slurm("scontrol", "show", "job", "--oneliner", number)
        if answer.returncode:
            if "Invalid job id" not in answer.stderr:
                return former  # it may be asked again
            return replace(former, name=former.name if former.ended else "forgotten", ended=True)
        fields = dict(re.findall(r"(\w+)=(\S*)", answer.stdout))
        name = fields.get("JobState", "")
        return cls(
            name=name,
            reason=fields.get("Reason", ""),
            nodes=fields.get("NodeList", ""),
            restarts=int(fields.get("Restarts", 0)),
            ended=name not in GOING_ON,
        )


# A job in any other state has ended.
GOING_ON = {
    *("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT"),
    *("REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"),
}


LINGER_S = 5.0  # a rank that failed stays so long for the others to report: Slurm ends them with it
STARTED_AGAIN = "Started again by Slurm, restart"  # what is above it in a log is of an earlier start


@dataclass(frozen=True)
class Task:
    """What submitit runs on every task of the job.

    Attributes:
        requeue: whether the job starts again after a signal.
        path: the import path of the submitting process, which finds a user's own modules.
    """

    job: Job
    requeue: bool
    path: tuple[str, ...]

    def __call__(self) -> None:
        """Run the job as one rank, report how it ended, and exit."""
        sys.path += [path for path in self.path if path not in sys.path]
        world = environment.join(os.environ)
        assert world is not None
        restarts = int(os.environ.get("SLURM_RESTART_COUNT", 0))
        if restarts:
            print(f"{STARTED_AGAIN} {restarts}", file=sys.stderr, flush=True)
        job = self.job.resumed(world.is_main) if restarts else self.job
        report = worker.run(job, world, None)
        folder, attempt = self.job.directory / "slurm", Attempt(os.environ["SLURM_JOB_ID"], restarts)
        write_report(folder, attempt, report)
        if report.kind == "summary":
            return
        print(report.message, file=sys.stderr, flush=True)
        if report.kind == "preempted":
            if not world.is_main:
                return  # rank 0 ends the job, one way or the other
            if self.requeue:
                _requeue(attempt.number)
        else:
            if report.kind == "failed" and not world.is_main:
                leave_failure_of_rank_0(job.directory, job.overrides, report.message.rstrip().rpartition("\n")[2])
            _linger(folder, attempt, world.world_size)
        sys.exit(report.exit_status)


@dataclass(frozen=True)
class Attempt:
    """One start of a job: Slurm may start it again under the same number."""

    number: str
    restarts: int


def _requeue(number: str) -> None:
    """Queue this very job again, unless Slurm is ending it: a job that was cancelled stays cancelled."""
    state = State.ask(number, State())
    if state.name != "RUNNING":
        print(f"Slurm job {number} is {state}: not queued again.", file=sys.stderr, flush=True)
        return
    answer = ask_slurm("scontrol", "requeue", number)
    became = f"could not be queued again: {answer.stderr.strip()}" if answer.returncode else "is queued again."
    print(f"Slurm job {number} {became}", file=sys.stderr, flush=True)


def _linger(folder: Path, attempt: Attempt, world_size: int) -> None:
    """Wait until the other ranks have reported, within a bound."""
    deadline = time.monotonic() + LINGER_S
    while time.monotonic() < deadline and len(read_reports(folder, attempt)) < world_size:
        time.sleep(0.1)


def write_report(folder: Path, attempt: Attempt, report: RankReport) -> None:
    """Write the report of a rank."""
    text = json.dumps({"of": [attempt.number, attempt.restarts], "report": report.to_json()})
    write_text(folder / f"rank_{report.rank}.json", text)


def read_reports(folder: Path, attempt: Attempt) -> dict[int, RankReport]:
    """Return the reports of this start of the job, by rank."""
    reports = {}
    for path in folder.glob("rank_*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):  # what is no report counts as none
            entry = json.loads(path.read_text(encoding="utf-8"))
            if entry["of"] == [attempt.number, attempt.restarts]:
                report = RankReport.from_json(entry["report"])
                reports[report.rank] = report
    return reports
