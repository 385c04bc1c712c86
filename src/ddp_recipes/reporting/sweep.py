"""What a sweep leaves behind: one table of its jobs, read from their directories, whoever ran them and wherever."""

import csv
import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import TextIO

from ddp_recipes.errors import RequestError
from ddp_recipes.reporting.progress import table
from ddp_recipes.reporting.run_directory import Summary


@dataclass(frozen=True)
class Row:
    """One job. ``seconds`` is wall time; ``error`` the last line of what ended it."""

    directory: str
    overrides: str
    status: str
    objective: float | None
    seconds: float | None
    error: str | None


def read_summary(directory: Path) -> Summary | None:
    """Return a run's summary, or ``None`` if it has not ended."""
    try:
        summary: Summary = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return summary


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
    return summary if summary["status"] == "finished" else None


def summaries(sweep_directory: Path) -> list[Summary]:
    """Return those of the jobs that have ended, in the order of their numbers, each with its ``run_directory``."""
    directories = sorted(sweep_directory.iterdir(), key=lambda path: (len(path.name), path.name))
    found = [(directory, read_summary(directory)) for directory in directories if directory.is_dir()]
    return [{"run_directory": str(directory), **summary} for directory, summary in found if summary is not None]


def rows(sweep_directory: Path) -> list[Row]:
    """Return the jobs of a sweep that have ended, in the order of their numbers."""
    return [
        Row(
            directory=Path(summary["run_directory"]).name,
            overrides=" ".join(summary.get("overrides", [])),
            status=summary["status"],
            objective=summary.get("objective"),
            seconds=summary.get("wall_time_s"),
            error=summary["error"],
        )
        for summary in summaries(sweep_directory)
    ]


def report(sweep_directory: Path, stream: TextIO) -> None:
    """Write ``sweep.csv`` into the sweep's directory and show it as a table."""
    if not sweep_directory.is_dir():
        return
    jobs = rows(sweep_directory)
    if not jobs:
        return
    with (sweep_directory / "sweep.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(field.name for field in fields(Row))
        writer.writerows(astuple(job) for job in jobs)
    shown = [
        (
            f"{job.directory}  {job.overrides}",
            f"{job.status}  "
            + (f"objective {job.objective:.6g}" if job.objective is not None else job.error or "")
            + (f"  {job.seconds:.1f} s" if job.seconds is not None else ""),
        )
        for job in jobs
    ]
    table(f"sweep in {sweep_directory}", shown, stream)
