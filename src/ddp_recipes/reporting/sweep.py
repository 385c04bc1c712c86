"""One table of a sweep's jobs, read from their directories."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from ddp_recipes.errors import RequestError
from ddp_recipes.reporting.progress import table
from ddp_recipes.reporting.run_directory import Summary, read_summary


def finished_before(directory: Path, overrides: Sequence[str]) -> Summary | None:
    """Return the summary of this very job if an earlier call of the sweep finished it.

    Raises:
        RequestError: the directory holds a job with other overrides: it is another sweep's.
    """
    summary = read_summary(directory)
    if summary is None:
        return None
    if summary.get("overrides", list(overrides)) != list(overrides):
        raise RequestError(
            f"{directory} holds a job of another sweep: {' '.join(summary['overrides'])}. This one is: "
            f"{' '.join(overrides)}. Use another hydra.sweep.dir."
        )
    return summary if summary.get("status") == "finished" else None


def summaries(sweep_directory: Path) -> list[Summary]:
    """Return those of the jobs that have ended, in the order of their numbers, each with its ``run_directory``."""
    directories = sorted(sweep_directory.iterdir(), key=lambda path: (len(path.name), path.name))
    found = [(directory, read_summary(directory)) for directory in directories if directory.is_dir()]
    return [
        {"run_directory": str(directory), **summary}
        for directory, summary in found
        if summary is not None and summary["status"] != "running"
    ]


def report(sweep_directory: Path, stream: TextIO) -> None:
    """Write ``sweep.csv``, a row for each job that has ended, into the sweep's directory, and show it as a table."""
    jobs = summaries(sweep_directory) if sweep_directory.is_dir() else []
    if not jobs:
        return
    shown = []
    with (sweep_directory / "sweep.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["directory", "overrides", "status", "objective", "seconds", "error"])
        for job in jobs:
            name, overrides = Path(job["run_directory"]).name, " ".join(job.get("overrides", []))
            status, objective, seconds, error = map(job.get, ("status", "objective", "wall_time_s", "error"))
            writer.writerow([name, overrides, status, objective, seconds, error])
            outcome = f"objective {objective:.6g}" if objective is not None else error or ""
            took = f"  {seconds:.1f} s" if seconds is not None else ""
            shown.append((f"{name}  {overrides}", f"{status}  {outcome}{took}"))
    table(f"sweep in {sweep_directory}", shown, stream)
