"""What a job of Slurm does on each of its tasks: it is one rank, and says in ``slurm/`` how it ended."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ddp_recipes.launchers import environment, worker
from ddp_recipes.reporting.run_directory import write_text
from ddp_recipes.runtime.job import Job

LINGER_S = 5.0  # a rank that failed stays so long for the others to say what they saw: Slurm ends them with it
STARTED_AGAIN = "Started again by Slurm, restart"  # what came before in a log is over


@dataclass(frozen=True)
class Task:
    """What submitit runs on every task of the job.

    Attributes:
        requeue: whether the job starts again after a signal.
        path: where the submitting process found its modules, a user's own among them.
    """

    job: Job
    requeue: bool
    path: tuple[str, ...]

    def __call__(self) -> None:
        """Run the job as the rank that this task is, say how it ended, and end with its exit status."""
        sys.path += [path for path in self.path if path not in sys.path]
        world = environment.join(os.environ)
        assert world is not None
        restarts = int(os.environ.get("SLURM_RESTART_COUNT", 0))
        if restarts:
            print(f"{STARTED_AGAIN} {restarts}", file=sys.stderr, flush=True)
        job = _resumed(self.job, world.is_main) if restarts else self.job
        words = worker.run(job, world, None)
        folder = self.job.directory / "slurm"
        said = {"of": [os.environ["SLURM_JOB_ID"], restarts], **words}
        write_text(folder / f"rank_{world.rank}.json", json.dumps(said))
        if words["kind"] == "summary":
            return
        print(words["message"], file=sys.stderr, flush=True)
        if words["kind"] == "preempted":
            if not world.is_main:
                return  # rank 0 ends the job, one way or the other
            if self.requeue:
                _requeue(os.environ["SLURM_JOB_ID"])
        else:
            _linger(folder, world.world_size, said["of"])
        sys.exit(words["exit_status"])


def _resumed(job: Job, main: bool) -> Job:
    """Return what a job that Slurm started again runs: it goes on from its last checkpoint, or begins anew."""
    from ddp_recipes.checkpointing.files import find

    if find("auto", job.directory):
        return job.resumed()
    if main:
        (job.directory / "config.yaml").unlink(missing_ok=True)  # what marks a directory as used
    return job


def _requeue(number: str) -> None:
    """Queue this very job again, unless Slurm is ending it: a job that was cancelled stays cancelled."""
    state = State.ask(number, State())
    if state.name != "RUNNING":
        print(f"Slurm job {number} is {state}: not queued again.", file=sys.stderr, flush=True)
        return
    answer = ask_slurm("scontrol", "requeue", number)
    said = f" could not be queued again: {answer.stderr.strip()}" if answer.returncode else " is queued again."
    print(f"Slurm job {number}{said}", file=sys.stderr, flush=True)


def _linger(folder: Path, world_size: int, of: list[Any]) -> None:
    """Wait until the other ranks have said how they ended, within a bound."""
    deadline = time.monotonic() + LINGER_S
    while time.monotonic() < deadline:
        if sum(words["of"] == of for words in reports(folder).values()) == world_size:
            return
        time.sleep(0.1)


def reports(folder: Path) -> dict[int, Mapping[str, Any]]:
    """Return what ranks said last, by rank."""
    names = {int(path.stem.removeprefix("rank_")): path for path in folder.glob("rank_*.json")}
    return {rank: json.loads(names[rank].read_text(encoding="utf-8")) for rank in sorted(names)}


def ask_slurm(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


@dataclass(frozen=True)
class State:
    """What Slurm says of a job."""

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
        """Ask the controller, which works without accounting; it forgets a job minutes after its end."""
        answer = ask_slurm("scontrol", "show", "job", "--oneliner", number)
        if answer.returncode:
            gone = "Invalid job id" in answer.stderr
            return replace(former, name=former.name if former.ended else "forgotten", ended=True) if gone else former
        fields = dict(re.findall(r"(\w+)=(\S*)", answer.stdout))
        name = fields.get("JobState", "")
        return cls(
            name=name,
            reason=fields.get("Reason", ""),
            nodes=fields.get("NodeList", ""),
            restarts=int(fields.get("Restarts", 0)),
            ended=name not in GOING_ON,
        )


# All other states of a job are ends.
GOING_ON = {
    *("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT"),
    *("REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"),
}
