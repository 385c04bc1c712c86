"""One table of a sweep's jobs, read from their directories."""

import csv
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from ddp_recipes.errors import RequestError
from ddp_recipes.reporting.progress import table
from ddp_recipes.reporting.run_directory import Summary, leave_failure_of_rank_0, read_summary, recording

RESUMES = "ckpt_path=auto"
RECORDS = (("summary.json",), ("config.yaml", "train.log"))  # of which a run has one or both


def finished_before(directory: Path, overrides: Sequence[str]) -> Summary | None:
    """Return the summary of this very job if an earlier call of the sweep finished it.

    With ``ckpt_path=auto`` it is the same one: that is how a run goes on which a signal has stopped.

    Raises:
        RequestError: the directory holds a job with other overrides: it is another sweep's.
    """
    summary = read_summary(directory)
    if summary is None:
        return None
    before = summary.get("overrides", overrides)
    if [each for each in before if each != RESUMES] != [each for each in overrides if each != RESUMES]:
        raise RequestError(
            f"{directory} holds a job of another sweep: {' '.join(before)}. This one is: "
            f"{' '.join(overrides)}. Use another hydra.sweep.dir."
        )
    return summary if summary["status"] == "finished" else None


def summaries(sweep_directory: Path) -> list[Summary]:
    """Return those of the jobs that have ended, in the order of their numbers, each with its ``run_directory``."""
    return [{"run_directory": str(directory), **summary} for directory, summary in _ended(sweep_directory)]


def _ended(sweep_directory: Path) -> list[tuple[Path, Summary]]:
    """Return the directories of jobs that have ended, at any depth (``hydra.sweep.subdir``), and their summaries."""
    directories = job_directories(sweep_directory)
    found = [(directory, read_summary(directory)) for directory in directories]
    return [(at, summary) for at, summary in found if summary is not None and summary["status"] != "running"]


def begun(sweep_directory: Path) -> list[tuple[Path, Summary]]:
    """Return those jobs that have ended and of which more was written than that they were refused."""
    return [
        (directory, summary) for directory, summary in _ended(sweep_directory) if (directory / "config.yaml").exists()
    ]


def some_failed(sweep_directory: Path) -> bool:
    """Whether some job has failed."""
    return any(summary["status"] == "failed" for _, summary in _ended(sweep_directory))


ENDED_S = 10.0  # for the ranks of a job whose process was killed to be gone


def broken(sweep_directory: Path, error: str) -> str:
    """Write that those jobs failed which were ended with the pool of processes that they ran in; return the message.

    Args:
        error: of the pool, which holds the exit codes.
    """
    codes = re.search(r"(?<=\{).*(?=\})", error)
    line = f"A process that ran a job died{f' ({codes[0]})' if codes else ''}: jobs that ran then ended."
    left = ended = [directory for directory in job_directories(sweep_directory) if _is_running(directory)]
    deadline = time.monotonic() + ENDED_S
    while left and time.monotonic() < deadline:
        for directory in left:
            leave_failure_of_rank_0(directory, (), line)
        left = [directory for directory in left if _is_running(directory)]
        time.sleep(0.02)
    names = ", ".join(str(directory.relative_to(sweep_directory)) for directory in ended)
    return (
        f"{line[:-1]}{f' ({names})' if names else ''}.\nIf nobody killed it, memory ran out (dmesg shows it): lower "
        f"hydra.launcher.n_jobs, data.batch_size or num_workers. To go on, call it again with the same hydra.sweep.dir."
    )


def _is_running(directory: Path) -> bool:
    """Whether it says so."""
    return (read_summary(directory) or {}).get("status") == "running"


def job_directories(sweep_directory: Path) -> list[Path]:
    """Return the directories of runs below one, at any depth, in the order of their numbers."""
    directories = []
    for folder, inside, _ in os.walk(sweep_directory):
        if holds_run(Path(folder)):
            directories.append(Path(folder))
            inside.clear()  # what else is there is the job's
    return sorted(directories, key=lambda path: [(len(part), part) for part in path.parts])


def holds_run(directory: Path) -> bool:
    """Return whether a directory is that of a run, also if one of its records is missing."""
    return any(all((directory / name).is_file() for name in names) for names in RECORDS)


def report(sweep_directory: Path, stream: TextIO) -> None:
    """Write ``sweep.csv``, a row for each job that has ended, into the sweep's directory, and show it as a table."""
    jobs = _ended(sweep_directory)
    if not jobs:
        return
    rows, shown = [], []
    for directory, job in jobs:
        name, overrides = str(directory.relative_to(sweep_directory)), " ".join(job.get("overrides", []))
        status, objective, seconds, error = map(job.get, ("status", "objective", "wall_time_s", "error"))
        rows.append([name, overrides, status, objective, seconds, error])
        outcome = error or (f"objective {objective:.6g}" if objective is not None else "")
        took = f"  {seconds:.1f} s" if seconds is not None else ""
        shown.append((f"{name}  {overrides}", f"{status}  {outcome}{took}"))
    path = sweep_directory / "sweep.csv"
    with recording(str(path)), path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["directory", "overrides", "status", "objective", "seconds", "error"])
        writer.writerows(rows)
    table(f"sweep in {sweep_directory}", shown, stream)
