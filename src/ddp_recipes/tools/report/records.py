"""What the files of a run directory say, whatever is missing or damaged, and its loggers' points. Loads no torch."""

import csv
import io
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from ddp_recipes.config.settings import better
from ddp_recipes.reporting.run_directory import Summary, read_summary
from ddp_recipes.runtime.files import open_file, read_text

Points = dict[int, float]  # values by step
FRAME = 16  # bytes that a record of an event file has besides what it holds: its length, and two checksums


@dataclass(frozen=True)
class Curves:
    """Each metric's values by step.

    Attributes:
        source: the file or folder that they are from, relative to the run directory; ``None`` where there is none.
        starts: how many times the run was started, where the files tell.
        problems: what could not be read.
    """

    points: Mapping[str, Points]
    source: str | None = None
    starts: int | None = None
    problems: tuple[str, ...] = ()


def read_curves(directory: Path) -> Curves:
    """Return the curves of a run: from ``csv/metrics.csv``, which has all digits, or from TensorBoard's event files."""
    table, events = directory / "csv" / "metrics.csv", sorted((directory / "tensorboard").glob("events.out.tfevents.*"))
    found = _of_table(table) if table.exists() else Curves({})
    if found.points or not events:
        return found
    of_events = _of_events(events)
    return Curves(of_events.points, of_events.source, of_events.starts, found.problems + of_events.problems)


def _of_table(path: Path) -> Curves:
    """Return the whole rows of a table; the last one may be cut where a run was killed, or goes on."""
    try:
        rows = csv.reader(io.StringIO(read_text(path), newline=""))
        header = next(rows, [])
        cells = [row for row in rows if row]
    except (OSError, ValueError, csv.Error) as error:
        return Curves({}, problems=(f"csv/metrics.csv cannot be read: {error}",))
    if header[:1] != ["step"]:
        return Curves({}, problems=("csv/metrics.csv does not begin with a row of names, the first of which is step",))
    points: defaultdict[str, Points] = defaultdict(dict)
    skipped = 0
    for row in cells:
        try:
            step, *values = row
            numbers = {name: float(value) for name, value in zip(header[1:], values, strict=True) if value}
            for name, value in numbers.items():
                points[name][int(step)] = value
        except ValueError:
            skipped += 1
    problems = (f"csv/metrics.csv: {skipped} rows are not numeric, or not whole",) if skipped else ()
    return Curves(points, "csv/metrics.csv", problems=problems)


def _of_events(paths: Iterable[Path]) -> Curves:
    """Return what TensorBoard shows of event files: a start hides what an earlier one logged at its steps and later."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    points: defaultdict[str, Points] = defaultdict(dict)
    problems, starts = [], 0
    for path in paths:
        read = 0
        starts += 1
        try:
            for record in RawEventFileLoader(str(path)).Load():
                read += len(record) + FRAME
                event = Event.FromString(record)
                if event.session_log.status == SessionLog.START:
                    _hide(points, event.step)
                for value in event.summary.value:
                    if (number := _scalar(value)) is not None:
                        points[value.tag][event.step] = number
            if (size := path.stat().st_size) > read:
                problems.append(
                    f"tensorboard/{path.name} can be read up to byte {read:,} of {size:,}: what follows is damaged, or "
                    f"not written to its end (a run that was killed, or goes on)"
                )
        except Exception as error:  # noqa: BLE001 - a damaged file must not end the report, whatever the reader makes of it
            problems.append(f"tensorboard/{path.name} cannot be read: {type(error).__name__}: {error}")
    return Curves(points, "tensorboard/", starts, tuple(problems))


def _hide(points: Mapping[str, Points], first: int) -> None:
    """Remove what is at a step and later."""
    for curve in points.values():
        for step in [step for step in curve if step >= first]:
            del curve[step]


def _scalar(value: Any) -> float | None:
    """Return the number of a ``Summary.Value``, which is of one kind; ``None`` for texts and pictures."""
    return float(value.simple_value) if value.WhichOneof("value") == "simple_value" else None


def thinned(points: Points, most: int) -> tuple[list[int], list[float | None]]:
    """Return steps and values to draw: of each of ``most / 2`` stretches the lowest and the highest point.

    What is not finite becomes ``None``. The first and the last point stay.
    """
    steps = sorted(points)
    if len(steps) > most:
        width = 2 * len(steps) / most
        stretches = [steps[round(n * width) : round((n + 1) * width)] for n in range(most // 2)]
        kept = {each for stretch in stretches if stretch for each in _extremes(points, stretch)}
        steps = sorted(kept | {steps[0], steps[-1]})
    return steps, [points[step] if math.isfinite(points[step]) else None for step in steps]


def _extremes(points: Points, steps: list[int]) -> tuple[int, int]:
    """Return where a stretch is lowest and highest; a value that is no number counts as both."""
    odd = [step for step in steps if not math.isfinite(points[step])]
    return (odd[0], odd[-1]) if odd else (min(steps, key=points.__getitem__), max(steps, key=points.__getitem__))


LOG_BYTES = 2_000_000  # of the end of train.log
TRACE_BYTES = 60_000  # of the end of a traceback, and of what else is shown as it is
PICTURE_BYTES = 4_000_000
PNG = b"\x89PNG\r\n\x1a\n"

_ENTRY = re.compile(r"^(?:(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d+ ([A-Z]+) |(?=rank \d+: ))", re.MULTILINE)
_PHASE = re.compile(r"^ {2}(\S.*?) +([\d.]+) ms +\d+%", re.MULTILINE)
_SECTION = re.compile(r"^(?=[^\s#-])", re.MULTILINE)


@dataclass(frozen=True)
class Entry:
    """A record of ``train.log``; what another rank sent has no time."""

    when: str
    level: str
    text: str


@dataclass(frozen=True)
class Checkpoint:
    """One saved state: its names, which may be several of one file, and the bytes that it takes."""

    names: str
    bytes: int
    written: str


@dataclass(frozen=True)
class Phase:
    """What a part of the mean step takes, in ms, and its share."""

    name: str
    ms: float
    share: float


@dataclass
class Record:
    """A run, as its files tell it.

    Attributes:
        summary: ``summary.json``, where what is missing is null; empty where the file is missing or damaged.
        config: ``config.yaml`` as it is, by section.
        problems: which files are missing, or damaged and how.
    """

    directory: Path
    summary: Summary = field(default_factory=dict)
    overrides: Sequence[str] = ()
    config: Mapping[str, str] = field(default_factory=dict)
    curves: Curves = field(default_factory=lambda: Curves({}))
    log: Sequence[Entry] = ()
    checkpoints: Sequence[Checkpoint] = ()
    traces: Mapping[str, str] = field(default_factory=dict)
    pictures: Mapping[str, bytes] = field(default_factory=dict)
    plan: str = ""
    problems: list[str] = field(default_factory=list)

    @property
    def status(self) -> str:
        """What became of the run."""
        return str(self.summary.get("status") or "unknown")

    @property
    def metrics(self) -> dict[str, Any]:
        """The latest number of each metric, by name."""
        found = self.summary.get("metrics")
        return found if isinstance(found, dict) else {}

    @property
    def monitor(self) -> str:
        """The metric that the run returns as its objective; empty where nothing says which."""
        return str(self.summary.get("monitor") or "")

    @property
    def warnings(self) -> list[Entry]:
        """What the log has of losses of ranks, warnings and errors."""
        return [entry for entry in self.log if entry.level not in ("INFO", "DEBUG")]

    @property
    def phases(self) -> list[Phase]:
        """Where the mean step's time goes, of a run with ``debug=profiler``."""
        texts = [entry.text for entry in self.log if entry.text.startswith("where a step's time goes")]
        found = [(name, float(ms)) for text in texts[-1:] for name, ms in _PHASE.findall(text) if name != "step"]
        whole = sum(ms for _, ms in found)
        return [Phase(name, ms, ms / whole if whole else 0.0) for name, ms in found]

    def direction(self) -> str | None:
        """Return whether its objective is better when it is lower (``min``) or higher; ``None`` if nothing tells."""
        said = re.search(r"^  mode: (min|max)$", self.config.get("checkpoint", ""), re.MULTILINE)
        return said[1] if said else better(self.monitor)


def read_record(directory: Path) -> Record:
    """Return what the files of a run directory say; what cannot be read is among its problems."""
    record = Record(directory)
    record.summary = _summary(record)
    overrides = record.summary.get("overrides")
    record.overrides = overrides if overrides is not None else _overrides(record)
    record.config = _sections(_text(record, "config.yaml", expected=True))
    record.curves = read_curves(directory)
    record.problems += record.curves.problems
    record.log = _entries(_text(record, "train.log", LOG_BYTES))
    record.checkpoints = _checkpoints(directory / "checkpoints")
    record.traces = {
        path.name: _text(record, f"ranks/{path.name}", TRACE_BYTES)
        for path in sorted((directory / "ranks").glob("*.txt"))
    }
    record.pictures = _pictures(record)
    record.plan = _text(record, "plan.json", TRACE_BYTES)
    return record


def _summary(record: Record) -> Summary:
    found = read_summary(record.directory)
    if found is None:
        there = (record.directory / "summary.json").exists()
        record.problems.append(
            "summary.json is damaged: it is no summary of a run in JSON" if there else "summary.json is missing"
        )
    return defaultdict(lambda: None, found or {})  # what is not there is null


def _text(record: Record, name: str, most: int | None = None, expected: bool = False) -> str:
    """Return the text of a file, or its end of at most so many bytes, from the beginning of a line on."""
    try:
        with open_file(record.directory / name) as file:
            size = file.seek(0, 2)
            cut = most is not None and size > most
            file.seek(size - most if cut and most else 0)
            text = file.readall().decode("utf-8", errors="replace")
    except FileNotFoundError:
        if expected:
            record.problems.append(f"{name} is missing")
        return ""
    except OSError as error:
        record.problems.append(f"{name} cannot be read: {error.strerror}")
        return ""
    if "\N{REPLACEMENT CHARACTER}" in text.lstrip("\N{REPLACEMENT CHARACTER}"):
        record.problems.append(f"{name} is damaged: not all of it is text")
    if cut:
        record.problems.append(f"{name} is long: its last {most:,} of {size:,} bytes are shown")
        text = text.partition("\n")[2]
    return text


def _overrides(record: Record) -> list[str]:
    """Return the overrides by Hydra's own record, a list in yaml of one line each."""
    text = _text(record, ".hydra/overrides.yaml")
    return [line[2:].strip("'\"") for line in text.splitlines() if line.startswith("- ")]


def _sections(text: str) -> dict[str, str]:
    """Return the top level of a yaml file: what belongs to each name, as it stands there; single values together."""
    parts = [part.rstrip() for part in _SECTION.split(text) if part.strip()]
    found = {"": "\n".join(part for part in parts if "\n" not in part)}
    found |= {part.partition(":")[0]: part for part in parts if "\n" in part}
    return {name: part for name, part in found.items() if part}


def _entries(text: str) -> list[Entry]:
    """Return the records of a log; lines that begin with no time go with the record before them."""
    starts = [*_ENTRY.finditer(text)]
    ends = [match.start() for match in starts[1:]] + [len(text)] * bool(starts)
    return [
        Entry(match[1] or "", match[2] or "WARNING", text[match.end() : end].rstrip())
        for match, end in zip(starts, ends, strict=True)
    ]


def _checkpoints(folder: Path) -> list[Checkpoint]:
    """Return the checkpoints of a folder, the latest last: one file may have several names, as ``best.pt``."""
    names: defaultdict[int, list[Path]] = defaultdict(list)
    for path in sorted(folder.glob("*.pt")) + sorted(folder.glob("*.json")):
        with suppress(FileNotFoundError):  # a run that goes on removes them
            names[path.stat().st_ino].append(path)
    found = []
    for paths in names.values():
        steps = [path for path in paths if path.stem.startswith("step_")]
        shown = [*steps, *(path for path in paths if path not in steps)]
        with suppress(FileNotFoundError):
            parts = [part for part in folder.glob(f"{shown[0].stem}-*/*") if part.is_file()]
            facts = [path.stat() for path in (shown[0], *parts)]
            last, size = max(each.st_mtime for each in facts), sum(each.st_size for each in facts)
            found.append((last, Checkpoint(", ".join(path.name for path in shown), size, written_at(last))))
    return [checkpoint for _, checkpoint in sorted(found, key=lambda pair: pair[0])]


def written_at(seconds: float) -> str:
    """Return a time as a log has it, in this machine's zone."""
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")


def _pictures(record: Record) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for path in sorted(record.directory.glob("*.png")):
        try:
            with open_file(path) as file:
                content = file.read(PICTURE_BYTES + 1)
        except OSError as error:
            record.problems.append(f"{path.name} cannot be read: {error.strerror}")
            continue
        if content.startswith(PNG) and len(content) <= PICTURE_BYTES:
            found[path.name] = content
        else:
            record.problems.append(f"{path.name} is not shown: it is no PNG, or larger than {PICTURE_BYTES:,} bytes")
    return found
