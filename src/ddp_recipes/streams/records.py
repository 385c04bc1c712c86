"""Shards by records, one after the other in a file: lines of text, JSON objects, and samples of a tar file."""

import io
import mmap
import os
import tarfile
from collections.abc import Iterable, Iterator, Mapping
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
        if not content:
            raise BadShard("it is empty")
        try:
            return _starts((name, begin, last) for name, begin, _, last in _plain_files(content))
        except _OtherHeader:
            pass
        try:
            with tarfile.open(fileobj=content, mode="r:") as file:
                files = (member for member in file if _is_file(member.type, member.name))
                found = _starts((member.name, member.offset, file.offset) for member in files)
                end = file.offset
        except (tarfile.TarError, ValueError) as error:  # the second where a file goes on behind the end
            cut_short = isinstance(error, ValueError) or "end of data" in str(error)
            raise BadShard(f"it is {'cut short' if cut_short else 'no tar file'}: {error}") from error
        if content[end : end + tarfile.BLOCKSIZE].strip(b"\0"):  # for ``tarfile`` it ends there
            raise BadShard(f"it is damaged or cut short: byte {end:,} begins no header of a file")
        return found

    def row(self, number: int) -> Row:
        content = self.bytes_of(number)
        found: Row = {}
        try:
            for name, _, first, last in _plain_files(content):
                _add(found, name, content[first:last])
        except _OtherHeader:
            return _members(content)
        return found


def _starts(files: Iterable[tuple[str, int, int]]) -> Offsets:
    """Return where each sample begins, and where the last one ends.

    Args:
        files: their names, where their headers begin, and where they end.
    """
    starts: list[int] = []
    last, end, others = None, 0, ""
    for name, begin, end_of_file in files:
        key, suffix = _key(name)
        if not suffix:
            others = others or name
            continue
        if key != last:
            starts.append(begin)
        last, end = key, _blocks(end_of_file)
    if others and not starts:
        raise BadShard(f"no file in it has a suffix, which is a sample's column: the first one is '{others}'")
    return np.array([*starts, end], dtype=np.int64)


class _OtherHeader(Exception):
    """A header is one for ``tarfile`` to read, or is damaged."""


def _plain_files(content: Any) -> Iterator[tuple[str, int, int, int]]:
    """Yield the names of files in a tar file, or in a part of one, where their headers begin, and where their content.

    Fields of a header: POSIX.1-2001, ``ustar`` and ``pax``, and GNU's for long names. ``tarfile`` takes ten times as
    long.

    Raises:
        _OtherHeader: there are others than these, or something is wrong.
    """
    at = begin = 0
    given: str | None = None  # name, by a header before that of the file
    while at < len(content):
        header = content[at : at + tarfile.BLOCKSIZE]
        kind, checksum, size = header[156:157], header[148:156], _octal(header[124:136])
        if sum(header) - sum(checksum) + 8 * ord(" ") != _octal(checksum) or size < 0 or not kind:
            if begin < at or header.strip(b"\0"):
                raise _OtherHeader
            return
        first = at + tarfile.BLOCKSIZE
        if kind in (b"x", b"L") and begin == at:
            inside = content[first : first + size]
            given = _pax_name(inside) if kind == b"x" else _text(inside)
            at = _blocks(first + size)
            continue
        if kind not in (b"0", b"\0", b"1", b"2", b"5"):  # files, links and folders
            raise _OtherHeader
        prefix = _text(header[345:500])
        name = given or (f"{prefix}/{_text(header[:100])}" if prefix else _text(header[:100]))
        is_file = _is_file(kind, name)
        at = _blocks(first + size * is_file)
        if at > len(content):
            raise _OtherHeader
        if is_file and not name.endswith("/"):  # else it is a folder of 1979
            yield name, begin, first, first + size
        begin, given = at, None


def _is_file(kind: bytes, name: str) -> bool:
    """Whether a member of a tar file has a content of its own.

    Raises:
        BadShard: it is a link, and would be a column of a sample.
    """
    if kind in (tarfile.LNKTYPE, tarfile.SYMTYPE) and _key(name)[1]:
        raise BadShard(
            f"'{name}' is a link, of which there is no content. Make it anew: tar --dereference --hard-dereference"
        )
    return kind in tarfile.REGULAR_TYPES


def _pax_name(content: bytes) -> str | None:
    """Return the name in a header of ``pax``, if one is there."""
    name, at = None, 0
    while at < len(content):
        length = content[at : at + 20].partition(b" ")[0]
        record = content[at : at + int(length)] if length.isdigit() else b""
        key, equals, value = record.partition(b" ")[2].partition(b"=")
        if not equals or key in (b"size", b"hdrcharset") or key.startswith(b"GNU.sparse"):
            raise _OtherHeader
        if key == b"path":
            name = value.removesuffix(b"\n").decode("utf-8", "surrogateescape")
        at += len(record)
    return name


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "surrogateescape")


def _blocks(end: int) -> int:
    """Return where the block ends in which something ends."""
    return -(-end // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE


def _octal(field: bytes) -> int:
    """Return the number in a field of a header; -1 where it is written in another way."""
    digits = field.strip(b" \0")
    return int(digits, 8) if digits.isdigit() and not digits.strip(b"01234567") else -1


def _members(content: bytes) -> Row:
    """Return the files in any part of a tar file."""
    found: Row = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as file:
            for member in file:
                if member.isfile() and (inside := file.extractfile(member)) is not None:
                    _add(found, member.name, inside.read())
    except tarfile.TarError as error:
        raise BadRow(f"it is no part of a tar file: {error}") from error
    return found


def _add(found: Row, name: str, content: bytes) -> None:
    key, suffix = _key(name)
    if suffix in found:
        raise BadRow(f"it has two files '{key}.{suffix}'")
    if suffix:
        found["__key__"], found[suffix] = key, content


def _key(name: str) -> tuple[str, str]:
    """Return the name of the sample that a file is of, and of the file in it; that is empty where it is of none.

    So are hidden files, of which macOS puts one before each, and those without a suffix.
    """
    folder, slash, file = name.rpartition("/")
    stem, _, suffix = file.partition(".")
    return f"{folder}{slash}{stem}", suffix.lower() if stem else ""
