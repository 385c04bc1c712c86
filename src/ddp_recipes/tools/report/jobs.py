"""What the jobs of a sweep have in common, and in what they differ."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_recipes.reporting.sweep import job_directories
from ddp_recipes.tools.report.records import Record, read_record

LARGEST = 1e300  # number that is drawn


@dataclass(frozen=True)
class Job:
    """A job of a sweep: its directory below the sweep's, its record, and its values of what differs, by key."""

    name: str
    record: Record
    values: dict[str, str]

    @property
    def objective(self) -> float | None:
        """The number that it returned to Hydra; ``None`` where there is none."""
        return finite(self.record.summary.get("objective"))


@dataclass(frozen=True)
class Sweep:
    """The jobs below a directory.

    Attributes:
        varied: keys of the overrides that are not the same for all jobs.
        common: overrides that are.
        metrics: names of what any job measured, but for what is measured in training.
    """

    directory: Path
    jobs: Sequence[Job]
    varied: Sequence[str]
    common: Sequence[str]
    metrics: Sequence[str]

    @property
    def monitor(self) -> str:
        """The metric that jobs return; empty where they return different ones, or nothing says which."""
        found = {job.record.monitor for job in self.jobs if job.record.monitor}
        return found.pop() if len(found) == 1 else ""

    @property
    def direction(self) -> str | None:
        """Whether a lower (``min``) or a higher objective is better; ``None`` where nothing tells."""
        found = {job.record.direction() for job in self.jobs if job.record.monitor == self.monitor}
        return found.pop() if self.monitor and len(found) == 1 else None

    @property
    def best(self) -> Job | None:
        """The job whose objective is best, of those that finished."""
        ended = [job for job in self.jobs if job.record.status == "finished" and job.objective is not None]
        if not ended or self.direction is None:
            return None
        sign = 1 if self.direction == "min" else -1
        return min(ended, key=lambda job: sign * (job.objective or 0.0))


def finite(value: Any) -> float | None:
    """Return a value if it is a number that can be drawn."""
    usable = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST
    return float(value) if usable else None


def read_sweep(directory: Path) -> Sweep:
    """Return what the directories of runs below one say, at any depth."""
    records = {str(path.relative_to(directory)): read_record(path) for path in job_directories(directory)}
    settings = {name: _settings(record.overrides) for name, record in records.items()}
    keys = list(dict.fromkeys(key for each in settings.values() for key in each))
    varied = [key for key in keys if len({each.get(key) for each in settings.values()}) > 1]
    jobs = [
        Job(name, record, {key: value for key, value in settings[name].items() if key in varied})
        for name, record in records.items()
    ]
    common = [f"{key}={value}" for key, value in settings[jobs[0].name].items() if key not in varied] if jobs else []
    measured = dict.fromkeys(name for job in jobs for name in job.record.metrics if not name.startswith("train/"))
    return Sweep(directory, jobs, varied, common, list(measured))


def _settings(overrides: Sequence[str]) -> dict[str, str]:
    """Return what overrides set, by key; one that deletes sets nothing."""
    found = (override.partition("=") for override in overrides)
    return {key.lstrip("+~"): value for key, _, value in found}
