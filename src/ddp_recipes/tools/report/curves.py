"""A run's numbers by step, from what its loggers have written."""

import csv
import io
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_recipes.runtime.files import read_text

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
