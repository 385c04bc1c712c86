"""From records to a page of HTML that needs nothing else; of a sweep also what its jobs have in common."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ddp_recipes._version import __version__
from ddp_recipes.reporting.progress import in_bytes, number
from ddp_recipes.reporting.sweep import job_directories
from ddp_recipes.tools.report.records import Points, Record, read_record, thinned, written_at

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


RUN_POINTS, SWEEP_POINTS = 2000, 300  # of a curve, that are drawn
FACTS = {  # of summary.json, in the order that they are shown in
    "mode": "mode",
    "strategy": "strategy",
    "world_size": "ranks",
    "nnodes": "nodes",
    "devices_per_replica": "devices a replica",
    "device": "device",
    "split": "stages begin at",
    "torch": "torch",
    "python": "Python",
    "ddp_recipes": "ddp_recipes",
    "weights_sha256": "weights (SHA-256)",
    "run_directory": "run directory",
}
MACHINE = {
    "samples_per_second": ("samples a second", ""),
    "step_time_ms": ("median step", " ms"),
    "wall_time_s": ("wall time", " s"),
    "samples_seen": ("samples seen", ""),
    "mfu": ("model-FLOPs utilisation", ""),
    "flops_per_step": ("FLOPs a step", ""),
}
# Metrics of how fast, not of how well.
OF_MACHINE = ("samples_per_second", "mfu", "flops_per_second", "peak_memory_bytes")
ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def run_page(record: Record) -> str:
    """Return the page of a run."""
    curves = {name: points for name, points in record.curves.points.items() if points and name != "train/epoch"}
    machine = [name for name in curves if name.rpartition("/")[2] in OF_MACHINE]
    charts = {
        "curves": _charts({name: curves[name] for name in curves if name not in machine}, RUN_POINTS),
        "machine": _charts({name: curves[name] for name in machine}, RUN_POINTS),
    }
    return _render(
        "run.html",
        title=record.directory.absolute().name,
        directory=record.directory,
        record=record,
        summary=record.summary,
        facts=FACTS,
        machine=MACHINE,
        pictures={
            name: base64.b64encode(content).decode()
            for name, content in record.pictures.items()
            if not (name == "profile.png" and record.phases)  # which it shows, too
        },
        latest=_latest(record.directory),
        data={"charts": charts},
    )


def sweep_page(sweep: Sweep) -> str:
    """Return the page of a sweep."""
    names = sorted({name for job in sweep.jobs for name, points in job.record.curves.points.items() if points})
    names = [name for name in names if name != "train/epoch"]
    charts = {
        name: [
            _line(job.name, job.record.curves.points[name], SWEEP_POINTS)
            for job in sweep.jobs
            if job.record.curves.points.get(name)
        ]
        for name in sorted(names, key=lambda name: (name != sweep.monitor, name))
    }
    jobs = [{"name": job.name, "values": job.values, "objective": job.objective} for job in sweep.jobs]
    return _render(
        "sweep.html",
        title=sweep.directory.absolute().name,
        directory=sweep.directory,
        sweep=sweep,
        problems_found=[f"{job.name}/{problem}" for job in sweep.jobs for problem in job.record.problems],
        data={
            "sweep": {"jobs": jobs, "varied": sweep.varied, "monitor": sweep.monitor, "direction": sweep.direction},
            "metrics": charts,
        },
    )


def _render(template: str, **values: Any) -> str:
    ENVIRONMENT.filters |= {"number": _number, "bytes": _bytes}
    now = datetime.now().strftime("%Y-%m-%d %H:%M:%S")
    return ENVIRONMENT.get_template(template).render(version=__version__, now=now, **values)


def _charts(curves: Mapping[str, Points], most: int) -> list[dict[str, Any]]:
    """Return charts to draw: what is measured under one name in training and in evaluation is in one of them."""
    groups: dict[str, list[str]] = {}
    for name in sorted(curves, key=lambda name: (not name.endswith("/loss"), name)):
        groups.setdefault(name.partition("/")[2] or name, []).append(name)
    return [
        {"title": title, "lines": [_line(name, curves[name], most) for name in names]}
        for title, names in groups.items()
    ]


def _line(name: str, points: Points, most: int) -> dict[str, Any]:
    steps, values = thinned(points, most)
    return {"name": name, "steps": steps, "values": values, "of": len(points)}


def _latest(directory: Path) -> str:
    """Return when the run last wrote one of its records; empty where there is none."""
    paths: Sequence[Path] = [directory / name for name in ("train.log", "summary.json", "config.yaml")]
    found = [path.stat().st_mtime for path in paths if path.is_file()]
    return written_at(max(found)) if found else ""


def _number(value: Any) -> str:
    """Return a value as a person reads it, a number as the terminal has it."""
    if value is None:
        return "–"
    return number(value) if finite(value) is not None else str(value)


def _bytes(value: Any) -> str:
    size = finite(value)
    return "–" if size is None else in_bytes(size)
