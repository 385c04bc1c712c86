"""Shards that are csv files: where their rows end, and the types of their columns."""

import csv
import io
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from ddp_recipes.streams.reader import BadRow, BadShard, Row, needed
from ddp_recipes.streams.records import CHUNK, Offsets, Records

csv.field_size_limit(1 << 30)  # Python's own is less than a long text


class Csv(Records):
    """Rows of a table whose first line names the columns; a field may hold newlines in quotes.

    Its columns have types once :meth:`typed` was called; as long as they have not, each field is what it looks like.
    """

    def scan(self, content: Any) -> Offsets:
        ends = self.line_ends(content)
        blank = _blank_lines(content, ends)
        if blank == len(ends):
            raise BadShard("it is empty, and a csv file begins with a line that names its columns")
        quotes = _quotes(content)
        # Within quotes a line ends no row; a quote in a field is doubled.
        ends = _parsed_ends(content, ends) if quotes is None else ends[np.searchsorted(quotes, ends) % 2 == 0]
        ends = ends[blank:]
        try:
            header = content[: int(ends[0])].decode("utf-8-sig").lstrip("\r\n")
            names = [name.strip() for name in next(csv.reader([header]))]
        except (UnicodeDecodeError, csv.Error) as error:  # such as of lines that end in a carriage return alone
            raise BadShard(f"its first line names no columns in UTF-8: {error}") from error
        if twice := [name for name in names if names.count(name) > 1]:
            raise BadShard(f"it has two columns '{twice[0]}'")
        self.typed(dict.fromkeys(names, UNTYPED))
        starts = ends[:-1]
        full = [at for at in range(len(starts)) if ends[at + 1] - starts[at] > 2 or content[starts[at]] not in b"\r\n"]
        return np.append(starts[full], ends[-1]).astype(np.int64) if len(full) else np.zeros(1, dtype=np.int64)

    def row(self, number: int) -> Row:
        try:
            fields = next(csv.reader(io.StringIO(self.bytes_of(number).decode(), newline=""), strict=True))
        except (UnicodeDecodeError, csv.Error, StopIteration) as error:
            raise BadRow(f"it is no row of a csv file: {error}") from error
        if len(fields) != len(self.columns):
            raise BadRow(f"it has {len(fields)} fields for {len(self.columns)} columns")
        return {name: of(field) for (name, of), field in zip(self._values, fields, strict=True)}

    def typed(self, columns: Mapping[str, str]) -> None:
        """Take these types of columns, as an index has them; not those of other columns."""
        if self.columns and self.columns.keys() != columns.keys():
            return
        self.columns = {name: columns[name] for name in self.columns or columns}
        self._values = [(name, _OF_TYPE.get(kind, _number)) for name, kind in self.columns.items()]

    def found_types(self) -> dict[str, str]:
        """Return the types of the columns, from all of their fields."""
        found = dict.fromkeys(self.columns, TYPES[0])
        first = 0
        while first < len(self):
            last = max(first + 1, int(np.searchsorted(self.offsets, self.offsets[first] + CHUNK)) - 1)
            start, stop = int(self.offsets[first]), int(self.offsets[last])
            kinds = _types_of(os.pread(self._file, stop - start, start), [*self.columns])
            found = {name: wider(found[name], kind) for name, kind in zip(found, kinds, strict=True)}
            first = last
        return found

    @staticmethod
    def together(one: Mapping[str, str], other: Mapping[str, str]) -> dict[str, str] | None:
        return {name: wider(kind, other[name]) for name, kind in one.items()} if one.keys() == other.keys() else None


def _blank_lines(content: Any, ends: Offsets) -> int:
    """Return how many lines are before the one that names the columns."""
    first = 3 if content[:3] == b"\xef\xbb\xbf" else 0
    return next((at for at, end in enumerate(ends) if content[first : int(end)].strip(b"\r\n")), len(ends))


def _types_of(content: bytes, names: Sequence[str]) -> list[str]:
    """Return the types of columns in some rows of a csv file."""
    arrow, types = needed("pyarrow.csv"), needed("pyarrow.types")
    try:
        table = arrow.read_csv(
            io.BytesIO(content),
            arrow.ReadOptions(use_threads=False, block_size=len(content), column_names=names),
            arrow.ParseOptions(newlines_in_values=True, invalid_row_handler=lambda row: "skip"),
            arrow.ConvertOptions(check_utf8=False, null_values=_MISSING),
        )
    except ValueError:  # what Arrow cannot read says nothing
        return [UNTYPED] * len(names)
    tests = (types.is_null, types.is_integer, types.is_floating, lambda kind: True)
    return [next(name for name, test in zip(TYPES, tests, strict=True) if test(kind)) for kind in table.schema.types]


def _quotes(content: Any) -> Offsets | None:
    """Return where the quotes of a table are; None where one is neither the first nor the last of a field, nor doubled.

    Such a one, as that of ``5" pipe,3``, is a part of its field.
    """
    begin = 3 if content[:3] == b"\xef\xbb\xbf" else 0
    found = [np.zeros(0, dtype=np.int64)]
    count = 0
    for first in range(begin, len(content), CHUNK):
        # With the bytes before and behind it; those of the file are between ends of lines.
        before = b"\n" if first == begin else content[first - 1 : first]
        around = np.frombuffer(before + content[first : first + CHUNK + 1] + b"\n", dtype=np.uint8)
        at = np.flatnonzero(around[1 : 1 + min(CHUNK, len(content) - first)] == ord('"'))
        opens = (count + np.arange(len(at))) % 2 == 0
        if not np.isin(around[np.where(opens, at, at + 2)], np.frombuffer(b',"\r\n', dtype=np.uint8)).all():
            return None
        found.append(at + first)
        count += len(at)
    return np.concatenate(found) if count % 2 == 0 else None


def _parsed_ends(content: Any, ends: Offsets) -> Offsets:
    """Return which ends of lines end a row, as Python's reader has it: many times as slow.

    Raises:
        BadShard: a quote that begins a field is the last one.
    """
    lines = (content[start:end].decode("latin-1") for start, end in pairwise([0, *ends.tolist()]))
    reader, found = csv.reader(lines, strict=True), [0]
    while True:
        try:
            next(reader)
        except StopIteration:
            return ends.take(np.array(found[1:]) - 1)
        except csv.Error as error:  # of this row alone, unless it goes on to the end
            if reader.line_num == len(ends) and str(error) == "unexpected end of data":
                raise BadShard(f"it has a quote without another one, in line {found[-1] + 1} or after it") from error
        found.append(reader.line_num)


UNTYPED = "text"
TYPES = ("nothing", "whole numbers", "numbers", "texts")  # of a csv file's columns: each holds what those before it do
_MISSING = ["", "-", "?", "NA", "N/A", "n/a", "#N/A", "NULL", "null", "None"]  # fields among numbers, which stay texts


def wider(one: str, other: str) -> str:
    """Return the type of a csv column that holds both."""
    return UNTYPED if UNTYPED in (one, other) else max(one, other, key=TYPES.index)


def _number(text: str, kinds: Sequence[Callable[[str], int | float]] = (int, float)) -> int | float | str:
    """Return a number where a text is one, of the first kind that fits; Python alone has numbers with underscores."""
    for kind in kinds if "_" not in text else ():
        try:
            return kind(text)
        except ValueError:
            continue
    return text


_MADE = (str, partial(_number, kinds=(int,)), partial(_number, kinds=(float,)), str)  # of a field, by the column's type
_OF_TYPE: dict[str, Callable[[str], Any]] = dict(zip(TYPES, _MADE, strict=True))
