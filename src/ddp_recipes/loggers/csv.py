"""A table that any program reads."""

from __future__ import annotations

import csv
import io
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, ClassVar

from ddp_recipes.loggers.base import Logger, Parameter, picture_in
from ddp_recipes.runtime.files import read_text, write_aside

HELD_ROWS = 1000


class CSVLogger(Logger):
    """Write ``metrics.csv``, one row a step and one column a name, and ``hparams.yaml`` into ``directory``.

    A cell is empty where the step has no such number. Only whole rows are written, so what a kill leaves can be read.

    Args:
        purge_step: on resume, remove the rows that an earlier start logged at this step and later; they come again.
        flush_secs: how long, in seconds, rows may wait in memory.
    """

    folder: ClassVar[str] = "csv"

    def __init__(self, directory: str | Path, purge_step: int | None = None, flush_secs: float = 30) -> None:
        self._directory = Path(directory)
        self._directory.mkdir(parents=True, exist_ok=True)
        self._path = self._directory / "metrics.csv"
        self._flush_secs = flush_secs
        self._flushed = time.monotonic()
        self._columns: list[str] = []
        # The rows that are not written, and the last one, which may get more numbers: by step, then by name.
        self._rows: dict[int, dict[str, float | str]] = {}
        self._file: BinaryIO | None = None
        self._begin = self._end = 0  # of the rows in the file, without the last one
        self._removed: list[tuple[int, dict[str, str]]] = []  # rows of an earlier start
        self._earlier: dict[str, set[int]] = {}  # numbers of batches by name, of an earlier start
        if self._path.exists():
            self._take_over(purge_step)

    def scalars(self, values: Mapping[str, float | str], step: int) -> None:
        if step not in self._rows:
            if len(self._rows) >= HELD_ROWS or time.monotonic() - self._flushed > self._flush_secs:
                self.flush()
            self._rows[step] = {}
        self._rows[step].update(values)

    def of_batch(self, values: Mapping[str, float], batch: int, step: int) -> None:
        self.go_on({name: batch for name in values if name not in self._earlier})
        fresh = {name: value for name, value in values.items() if batch not in self._earlier[name]}
        if fresh:
            self.scalars(fresh, batch)

    def go_on(self, batches: Mapping[str, int]) -> None:
        if not batches:
            return
        self.flush()
        points = [*self.points()]
        self._earlier |= {name: {number for number, found in points if name in found} for name in batches}
        for number, cells in self._removed:
            kept = {name: cells[name] for name, first in batches.items() if name in cells and number < first}
            if kept:
                self.scalars(kept, number)

    def flush(self) -> None:
        self._flushed = time.monotonic()
        known = set(self._columns)
        new = list(dict.fromkeys(name for row in self._rows.values() for name in row if name not in known))
        if new:
            written = ""
            if self._file is not None:
                self._file.seek(self._begin)
                written = self._file.read(self._end - self._begin).decode()
            wider = (f"{row[:-1]}{',' * len(new)}\n" for row in written.splitlines(keepends=True))
            self._replace([*self._columns, *new], wider)
        elif self._file is not None:
            self._write(self._file)

    def _write(self, file: BinaryIO) -> None:
        """Write all rows over the last one, which may have got more numbers since."""
        if not self._rows:
            return
        lines = [
            f"{step},{','.join([str(row.get(name, '')) for name in self._columns])}\n".encode()
            for step, row in self._rows.items()
        ]
        file.seek(self._end)
        file.write(b"".join(lines))
        file.truncate()
        self._end += sum(map(len, lines[:-1]))
        self._rows = dict([self._rows.popitem()])

    def _replace(self, columns: list[str], rows: Iterable[str]) -> None:
        """Put a new file, of these rows and those not yet written, in the place of the old one."""
        self._columns = columns
        header = io.StringIO()
        csv.writer(header, lineterminator="\n").writerow(["step", *columns])
        aside = self._path.with_suffix(".csv.tmp")
        with aside.open("wb") as file:
            self._begin = file.write(header.getvalue().encode())
            file.writelines(row.encode() for row in rows)
            self._end = file.tell()
            self._write(file)
        os.replace(aside, self._path)
        if self._file is not None:
            self._file.close()
        self._file = self._path.open("r+b", buffering=0)

    def _take_over(self, purge_step: int | None) -> None:
        """Keep the rows of an earlier start that are whole and before ``purge_step``; go on with the last of them."""
        file = io.StringIO(read_text(self._path), newline="")
        columns = next(csv.reader(file), [])[1:]
        rows = []
        for row in file:
            step, *cells = row.rstrip("\n").split(",")
            whole = row.endswith("\n") and step.isdecimal() and len(cells) == len(columns)
            if whole and (purge_step is None or int(step) < purge_step):
                rows.append(row)
            elif whole:
                found = {name: cell for name, cell in zip(columns, cells, strict=True) if cell}
                self._removed.append((int(step), found))
        if rows:
            step, *cells = rows.pop().rstrip("\n").split(",")
            self._rows[int(step)] = {name: cell for name, cell in zip(columns, cells, strict=True) if cell}
        self._replace(columns, rows)

    def hparams(
        self, params: Mapping[str, Parameter], metrics: Mapping[str, float], chosen: Collection[str] = ()
    ) -> None:
        from omegaconf import OmegaConf

        first = {name: value for name, value in params.items() if name in chosen}
        text = OmegaConf.to_yaml(OmegaConf.create({**first, **params}))
        write_aside(self._directory / "hparams.yaml", lambda file: file.write(text.encode()), durable=False)

    def close(self) -> None:
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    def points(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield each step that is in the file, with its numbers by name."""
        if self._path.exists():
            for row in csv.DictReader(io.StringIO(read_text(self._path), newline="")):
                yield int(row.pop("step")), {name: float(cell) for name, cell in row.items() if cell}

    def image(self, tag: str, png: bytes) -> None:
        """Write the picture as ``<tag>.png``, over an earlier one."""
        write_aside(picture_in(self._directory, tag), lambda file: file.write(png), durable=False)

    def see_with(self, run_directory: str) -> str:
        return f"column -s, -t {run_directory}/csv/metrics.csv"
