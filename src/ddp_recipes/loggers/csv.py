"""A table that any program reads."""

from __future__ import annotations

import csv
import io
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import BinaryIO, ClassVar

from ddp_recipes.loggers.base import Logger

HOLD_LINES = 1000


class CSVLogger(Logger):
    """Writes ``metrics.csv``, one row a step and one column a name, and ``hparams.yaml`` into ``directory``.

    A cell is empty where the step has no such number. Only whole rows are written, so what a kill leaves can be read.

    ``purge_step``: on resume, remove the rows that an earlier start logged at this step and later; they come anew.
    ``flush_secs``: how long, in seconds, rows may wait in memory.
    """

    folder: ClassVar[str] = "csv"

    def __init__(self, directory: str | Path, purge_step: int | None = None, flush_secs: float = 30) -> None:
        self._directory = Path(directory)
        self._directory.mkdir(parents=True, exist_ok=True)
        self._path = self._directory / "metrics.csv"
        self._flush_secs = flush_secs
        self._written = time.monotonic()
        self._columns: list[str] = []
        self._known: set[str] = set()
        self._lines: list[str] = []  # rows that are complete, but not written
        self._step: int | None = None
        self._row: dict[str, float | str] = {}  # of `_step`, which may get more numbers
        self._file: BinaryIO | None = None
        self._end = 0  # where the row of `_step` begins in the file, if it is there
        if self._path.exists():
            self._take_over(purge_step)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        if step != self._step:
            self._end_row()
            self._step = step
        self._row.update(values)

    def _end_row(self) -> None:
        if not self._row:
            return
        if not self._row.keys() <= self._known:
            self._widen()
        self._lines.append(self._line())
        self._row = {}
        if len(self._lines) >= HOLD_LINES or time.monotonic() - self._written > self._flush_secs:
            self._write()

    def _line(self) -> str:
        row = self._row
        return f"{self._step},{','.join([str(row.get(name, '')) for name in self._columns])}\n"

    def _write(self) -> None:
        """Write the held rows over the last one, which may have got more numbers since."""
        self._written = time.monotonic()
        if self._file is None:
            return
        held = "".join(self._lines).encode()
        last = self._line().encode() if self._row else b""
        self._lines.clear()
        self._file.seek(self._end)
        self._file.write(held + last)
        self._file.truncate()
        self._end += len(held)

    def _widen(self) -> None:
        """Add the columns of the current row that the table does not have: a new file takes the place of the old."""
        new = [name for name in self._row if name not in self._known]
        held, self._lines = self._lines, []
        rows = chain(self._rows(), held)
        self._replace([*self._columns, *new], (f"{row[:-1]}{',' * len(new)}\n" for row in rows))

    def _rows(self) -> Iterator[str]:
        """Yield the rows of the file up to ``_end``."""
        if self._end == 0:
            return
        with self._path.open("rb") as file:
            next(csv.reader(line.decode() for line in file))
            while file.tell() < self._end:
                yield file.readline().decode()

    def _replace(self, columns: list[str], rows: Iterable[str]) -> None:
        """Write a new file row by row, the current one last, and go on at its end."""
        self._columns, self._known = columns, set(columns)
        header = io.StringIO()
        csv.writer(header, lineterminator="\n").writerow(["step", *columns])
        aside = self._path.with_suffix(".csv.tmp")
        with aside.open("wb") as file:
            file.write(header.getvalue().encode())
            file.writelines(row.encode() for row in rows)
            self._end = file.tell()
            if self._row:
                file.write(self._line().encode())
        os.replace(aside, self._path)
        if self._file is not None:
            self._file.close()
        self._file = self._path.open("r+b", buffering=0)

    def _take_over(self, purge_step: int | None) -> None:
        """Keep the rows of an earlier start that are whole and before ``purge_step``; go on with the last of them."""
        with self._path.open(encoding="utf-8", newline="") as file:
            header = next(csv.reader(file), [])
        last = ""

        def kept() -> Iterator[str]:
            nonlocal last
            for row in self._rows():
                step, *cells = row.split(",")
                whole = row.endswith("\n") and step.isdecimal() and len(cells) == len(header) - 1
                if whole and (purge_step is None or int(step) < purge_step):
                    last = row
                    yield row

        self._end = self._path.stat().st_size
        self._replace(header[1:], kept())
        if last:
            self._end -= len(last.encode())
            step, *cells = last.rstrip("\n").split(",")
            self._step = int(step)
            self._row = {name: cell for name, cell in zip(self._columns, cells, strict=True) if cell}

    def hparams(
        self,
        params: Mapping[str, bool | int | float | str],
        metrics: Mapping[str, float],
        chosen: Collection[str] = (),
    ) -> None:
        from omegaconf import OmegaConf

        first = {name: value for name, value in params.items() if name in chosen}
        aside = self._directory / "hparams.yaml.tmp"
        aside.write_text(OmegaConf.to_yaml(OmegaConf.create({**first, **params})), encoding="utf-8")
        os.replace(aside, self._directory / "hparams.yaml")

    def flush(self) -> None:
        if not self._row.keys() <= self._known:
            self._widen()
        self._write()

    def close(self) -> None:
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    def see_with(self, run_directory: str) -> str:
        return f"column -s, -t {run_directory}/csv/metrics.csv"
