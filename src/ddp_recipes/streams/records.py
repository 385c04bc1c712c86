"""Shards by records, one after the other in a file: lines of text, JSON objects, and samples of a tar file."""

import io
import mmap
import os
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from ddp_recipes.streams.reader import BadRow, BadShard, Part, Row, alike

Offsets = NDArray[np.int64]

CHUNK = 1 << 24  # bytes that are searched for the ends of lines at once


class Records:
    """Rows that lie one after the other in a file, each of which can be read by itself."""

    columns: Mapping[str, str]

    def __init__(self, path: Path) -> None:
        self.columns = {}
        self.open(path)
        self.offsets = self._scanned()

    def open(self, path: Path) -> None:
        """Open the file; once more after it was closed, of which it is known where its rows are."""
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._close = finalize(self, os.close, self._file)

    def _scanned(self) -> Offsets:
        if os.fstat(self._file).st_size == 0:
            return self.scan(b"")
        with mmap.mmap(self._file, 0, access=mmap.ACCESS_READ) as content:
            return self.scan(content)

    def __len__(self) -> int:
        return max(0, len(self.offsets) - 1)

    def scan(self, content: Any) -> Offsets:
        """Return where each row begins, and where the last one ends."""
        raise NotImplementedError

    def bytes_of(self, number: int) -> bytes:
        """Return a row as it is in the file, which is not mapped: that would count as memory of each rank."""
        start, stop = int(self.offsets[number]), int(self.offsets[number + 1])
        found = os.pread(self._file, stop - start, start)
        if len(found) < stop - start:
            raise BadShard("it was cut short while it was read")
        return found

    def row(self, number: int) -> Row:
        """Return a row, which is undecoded where that may fail for it alone."""
        raise NotImplementedError

    def part(self, number: int) -> Part:
        return Part(0, len(self), self.row)

    def typed(self, columns: Mapping[str, str]) -> None:
        """Take these types of columns, as an index has them."""

    def found_types(self) -> Mapping[str, str]:
        """Return the types of the columns, from all rows."""
        return dict(self.columns)

    @staticmethod
    def together(one: Mapping[str, str], other: Mapping[str, str]) -> Mapping[str, str] | None:
        """Return the columns of a set whose shards have these; None: they are of different sets."""
        return one if alike(one, other) else None

    def close(self) -> None:
        """Close the file."""
        self._close()

    def line_ends(self, content: Any) -> NDArray[np.int64]:
        """Return where the lines of the file end, each behind its newline."""
        size = len(content)
        found = [np.zeros(0, dtype=np.int64)]
        for first in range(0, size, CHUNK):
            chunk = np.frombuffer(content[first : first + CHUNK], dtype=np.uint8)
            found.append(np.flatnonzero(chunk == ord("\n")) + (first + 1))
        if size and content[size - 1 : size] != b"\n":
            found.append(np.array([size]))
        return np.concatenate(found)


class Text(Records):
    """Lines of a text that are not empty, as ``text``."""

    def scan(self, content: Any) -> Offsets:
        ends = self.line_ends(content)
        starts = np.concatenate([[0], ends[:-1]])[: len(ends)].astype(np.int64)
        maybe = self.may_be_blank(content, starts, ends).tolist()
        blank = [at for at in maybe if not content[int(starts[at]) : int(ends[at])].strip()]
        kept = np.delete(starts, blank)
        return np.append(kept, len(content)) if len(kept) else np.zeros(1, dtype=np.int64)

    @staticmethod
    def may_be_blank(content: Any, starts: Offsets, ends: Offsets) -> Offsets:
        """Return which lines may be blank: of a text those of a character, for several spaces are a text."""
        return np.flatnonzero(ends - starts <= 2)

    def row(self, number: int) -> Row:
        try:
            line = self.bytes_of(number).partition(b"\n")[0].removesuffix(b"\r")  # without blank ones behind it
            return {"text": line.decode("utf-8" if number else "utf-8-sig")}
        except UnicodeDecodeError as error:
            raise BadRow(f"it is no UTF-8: {error}") from error


class Tar(Records):
    """Samples of a tar file as webdataset has them: files in a row with one name but for what follows its first dot."""

    def scan(self, content: Any) -> Offsets:
        starts: list[int] = []
        last, end, others = None, 0, ""
        if not content:
            raise BadShard("it is empty")
        try:
            with tarfile.open(fileobj=content, mode="r:") as file:
                for member in file:
                    key, suffix = _key(member.name)
                    if not member.isfile() or not suffix:
                        others = others or (member.name if member.isfile() else "")
                        continue
                    if key != last:
                        starts.append(member.offset)
                    last, end = key, file.offset  # where the next one begins; of a sparse file its size is another
        except tarfile.TarError as error:
            raise BadShard(f"it is no tar file: {error}") from error
        if end > len(content):
            raise BadShard("it is cut short: a file in it goes on behind its end")
        if others and not starts:
            raise BadShard(f"no file in it has a suffix, which is a sample's column: the first one is '{others}'")
        return np.array([*starts, end], dtype=np.int64)

    def row(self, number: int) -> Row:
        content = self.bytes_of(number)
        try:
            return _plain_members(content) or _members(content)
        except tarfile.TarError as error:
            raise BadRow(f"it is no part of a tar file: {error}") from error


def _plain_members(content: bytes) -> Row:
    """Return the files in a part of a tar file; nothing where others than plain ones are in it, or something is wrong.

    Fields of a header: POSIX.1-1988, ``ustar``. To have ``tarfile`` read it takes ten times as long.
    """
    found: Row = {}
    at = 0
    while at < len(content):
        header = content[at : at + tarfile.BLOCKSIZE]
        kind, long_name, checksum = header[156:157], header[345:346], header[148:156]
        name = header[:100].partition(b"\0")[0]
        size = _octal(header[124:136])
        plain = kind == tarfile.REGTYPE and long_name == b"\0" and size >= 0
        if not plain or sum(header) - sum(checksum) + 8 * ord(" ") != _octal(checksum):
            return {}
        key, suffix = _key(name.decode("utf-8", "surrogateescape"))
        at += tarfile.BLOCKSIZE
        if suffix:
            _add(found, key, suffix, content[at : at + size])
        at += -(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
        if at > len(content):
            raise tarfile.ReadError("unexpected end of data")
    return found


def _octal(field: bytes) -> int:
    """Return the number in a field of a header; -1 where it is written in another way."""
    digits = field.strip(b" \0")
    return int(digits, 8) if digits.isdigit() and not digits.strip(b"01234567") else -1


def _members(content: bytes) -> Row:
    """Return the same of any part, which takes some times as long."""
    found: Row = {}
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as file:
        for member in file:
            key, suffix = _key(member.name)
            if suffix and member.isfile() and (inside := file.extractfile(member)) is not None:
                _add(found, key, suffix, inside.read())
    return found


def _add(found: Row, key: str, suffix: str, content: bytes) -> None:
    if suffix in found:
        raise BadRow(f"it has two files '{key}.{suffix}'")
    found["__key__"], found[suffix] = key, content


def _key(name: str) -> tuple[str, str]:
    """Return the name of the sample that a file is of, and of the file in it; that is empty where it is of none.

    So are hidden files, of which macOS puts one before each, and those without a suffix.
    """
    folder, slash, file = name.rpartition("/")
    stem, _, suffix = file.partition(".")
    return f"{folder}{slash}{stem}", suffix.lower() if stem else ""
