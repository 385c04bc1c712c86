"""What shards are made of: rows of parquet, arrow, jsonl, csv, text and tar files, each read by itself."""

import csv
import io
import json
import mmap
import os
import tarfile
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from ddp_recipes.errors import RequestError, not_one_of

Row = dict[str, Any]
Offsets = NDArray[np.int64]

COMPRESSIONS = (".gz", ".zst")
_CHUNK = 1 << 24  # bytes that are searched for the ends of lines at once
csv.field_size_limit(1 << 30)  # Python's own is less than a long text


class BadShard(Exception):
    """A shard is missing, damaged, or not what its index says."""


class BadRow(Exception):
    """A row of a shard cannot be decoded."""


def needed(module: str) -> Any:
    """Return a module of the extra ``streams``.

    Raises:
        RequestError: it is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise RequestError(
            f"data=stream needs {package}, which is not installed: pip install 'ddp-recipes[streams]'."
        ) from error


class Part(NamedTuple):
    """Rows of a shard that lie in one place.

    Attributes:
        first, end: the numbers of its rows, in the shard.
        row: returns one by its number in the part, undecoded where that may fail for it alone; raises :class:`BadRow`.
    """

    first: int
    end: int
    row: Callable[[int], Row]


def span(ends: Sequence[int], number: int) -> tuple[int, int, int]:
    """Return which of some parts in a row, by where they end, a row lies in, and where that begins and ends."""
    which = bisect_right(ends, number)
    return which, ends[which - 1] if which else 0, ends[which]


class Reader(Protocol):
    """An open shard; ``columns`` are names and types of its columns, as far as the file has them."""

    columns: Mapping[str, str]

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def part(self, number: int) -> Part:
        """Return the rows around one.

        Raises:
            BadShard: they cannot be read.
        """
        ...


class Groups:
    """Row groups in memory, those that were used last, up to a limit in bytes; at least one.

    Attributes:
        read: bytes of those that have been read, again where they had been removed.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.size, self.read = limit, 0, 0
        self._held: OrderedDict[tuple[int, int], Table] = OrderedDict()

    def get(self, shard: "Parquet", group: int) -> "Table":
        """Return a row group."""
        name = (id(shard), group)
        if (held := self._held.get(name)) is not None:
            self._held.move_to_end(name)
            return held
        table = shard.read_group(group)
        self._held[name] = table
        self.size += table.bytes
        self.read += table.bytes
        while self.size > self.limit and len(self._held) > 1:
            self.size -= self._held.popitem(last=False)[1].bytes
        return table

    def drop(self, shard: "Parquet") -> None:
        """Remove what is held of a shard."""
        for name in [name for name in self._held if name[0] == id(shard)]:
            self.size -= self._held.pop(name).bytes


class Parquet:
    """Rows of a parquet file, read by row groups."""

    def __init__(self, path: Path, groups: Groups, only: Sequence[str] | None) -> None:
        parquet = needed("pyarrow.parquet")
        try:
            self._file = parquet.ParquetFile(str(path), memory_map=True)
        except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
            raise BadShard(f"it is no parquet file: {error}") from error
        schema, metadata = self._file.schema_arrow, self._file.metadata
        self.columns = _columns(schema)
        rows = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
        self._ends = list(accumulate(rows))
        sizes = [metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups)]
        self.in_memory = len(sizes), sum(sizes)
        self._only = None if only is None else [name for name in only if name in self.columns]
        self._shapes, self._groups = _shapes(schema), groups

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def part(self, number: int) -> Part:
        group, first, end = span(self._ends, number)
        return Part(first, end, self._groups.get(self, group).row)

    def read_group(self, group: int) -> "Table":
        """Return a row group, read from the file."""
        try:
            return Table(self._file.read_row_group(group, columns=self._only, use_threads=False), self._shapes)
        except (OSError, ValueError) as error:
            raise BadShard(f"row group {group} cannot be read: {error}") from error

    def close(self) -> None:
        """Close the file."""
        self._groups.drop(self)
        self._file.close()


class Arrow:
    """Rows of an Arrow file, or of a stream in a file, mapped from disk."""

    def __init__(self, path: Path, only: Sequence[str] | None) -> None:
        arrow = needed("pyarrow")
        try:
            self._map = arrow.memory_map(str(path))
            try:
                table = arrow.ipc.open_file(self._map).read_all()
            except arrow.ArrowInvalid:
                self._map.seek(0)
                table = arrow.ipc.open_stream(self._map).read_all()
        except (OSError, ValueError) as error:
            raise BadShard(f"it is no Arrow file: {error}") from error
        self.columns = _columns(table.schema)
        self._rows = int(table.num_rows)
        shapes = _shapes(table.schema)
        if only is not None:
            table = table.select([name for name in only if name in self.columns])
        batches = [batch for batch in table.to_batches() if batch.num_rows]
        self._ends = list(accumulate(batch.num_rows for batch in batches))
        self._tables = [Table(batch, shapes) for batch in batches]

    def __len__(self) -> int:
        return self._rows

    def part(self, number: int) -> Part:
        batch, first, end = span(self._ends, number)
        return Part(first, end, self._tables[batch].row)

    def close(self) -> None:
        """Unmap the file, once nothing refers to it."""
        del self._tables
        self._map.close()


def _columns(schema: Any) -> dict[str, str]:
    """Return names and types of columns; of types that only a library knows, once it is loaded, those below them."""
    extension = needed("pyarrow").ExtensionType
    types = {field.name: field.type for field in schema}
    return {name: str(kind.storage_type if isinstance(kind, extension) else kind) for name, kind in types.items()}


def alike(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Whether columns are the same, whatever who wrote them calls the elements of lists."""
    named = [{name: kind.replace("<element:", "<item:") for name, kind in each.items()} for each in (one, other)]
    return named[0] == named[1]


def _shapes(schema: Any) -> dict[str, list[int]]:
    """Return the shapes of columns that hold tensors, flattened: of those that were packed, and of Arrow's own type."""
    own = {field.name: field.type.shape for field in schema if getattr(field.type, "shape", None)}
    return own | {
        field.name: json.loads(field.metadata[b"shape"]) for field in schema if b"shape" in (field.metadata or {})
    }


class Table:
    """Rows of Arrow columns in memory, or mapped.

    Args:
        table: a table, or a record batch.
        shapes: of the tensors that columns hold flattened.

    Attributes:
        bytes: that it takes.
    """

    def __init__(self, table: Any, shapes: Mapping[str, Sequence[int]]) -> None:
        self.bytes = table.nbytes
        columns = zip(table.schema.names, table.columns, strict=True)
        self._columns = [(name, _getter(column, shapes.get(name))) for name, column in columns]

    def row(self, number: int) -> Row:
        """Return a row; its arrays have memory of their own."""
        return {name: get(number) for name, get in self._columns}


def _getter(column: Any, shape: Sequence[int] | None) -> Callable[[int], Any]:
    """Return what gives a column's value by its number: of lists of numbers arrays, else Python's own."""
    if hasattr(column, "chunks"):
        column = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    if hasattr(column, "storage"):  # of an extension, such as Arrow's tensors, whose axes may lie in another order
        of_storage, axes = _getter(column.storage, shape), getattr(column.type, "permutation", None)
        return of_storage if not axes else lambda number: _in_order(of_storage(number), axes)
    elements = getattr(column, "values", None)
    if needed("pyarrow.types").is_string(column.type) and not column.null_count:
        return _text_getter(column)
    views = hasattr(column, "sizes")  # whose elements may lie in any order
    if elements is None or views or column.null_count or elements.null_count or not _is_numeric(elements.type):
        return lambda number: _value_of(column[number], shape)
    flat = elements.to_numpy(zero_copy_only=False)
    if (size := getattr(column.type, "list_size", None)) is not None:
        first = column.offset

        def of_one_length(number: int) -> Any:
            return _own(flat[(first + number) * size : (first + number + 1) * size], shape)

        return of_one_length
    ends = column.offsets.to_numpy()

    def of_any_length(number: int) -> Any:
        return _own(flat[ends[number] : ends[number + 1]], shape)

    return of_any_length


def _in_order(tensor: Any, axes: Sequence[int]) -> Any:
    return tensor if tensor is None else np.ascontiguousarray(tensor.transpose(axes))


def _text_getter(column: Any) -> Callable[[int], str]:
    """Return what gives a text by its number, from where it lies: in half the time that Arrow's own scalars take."""
    _, ends, content = column.buffers()
    at, texts = np.frombuffer(ends, dtype=np.int32)[column.offset :], memoryview(content or b"")
    return lambda number: str(texts[at[number] : at[number + 1]], "utf-8")


def _value_of(value: Any, shape: Sequence[int] | None) -> Any:
    elements = getattr(value, "values", None)  # of a list
    if elements is None or not hasattr(elements, "to_numpy") or not _is_numeric(elements.type):
        return value.as_py()
    return _own(elements.to_numpy(zero_copy_only=False), shape)


def _own(values: NDArray[Any], shape: Sequence[int] | None) -> NDArray[Any]:
    """Return values with own memory: a tensor, or a list, whose floats are float32 as Python's are in a batch."""
    if shape is not None:
        return values.reshape(shape).copy()
    return values.astype(np.float32 if values.dtype == np.float64 else values.dtype)


def _is_numeric(kind: Any) -> bool:
    types = needed("pyarrow.types")
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))


# --- files whose rows have offsets -----------------------------------------------------------------------------------


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

    def close(self) -> None:
        """Close the file."""
        self._close()

    def line_ends(self, content: Any) -> NDArray[np.int64]:
        """Return where the lines of the file end, each behind its newline."""
        size = len(content)
        found = [np.zeros(0, dtype=np.int64)]
        for first in range(0, size, _CHUNK):
            chunk = np.frombuffer(content[first : first + _CHUNK], dtype=np.uint8)
            found.append(np.flatnonzero(chunk == ord("\n")) + (first + 1))
        if size and content[size - 1 : size] != b"\n":
            found.append(np.array([size]))
        return np.concatenate(found)


class Text(Records):
    """Lines of a text that are not empty, as ``text``."""

    def scan(self, content: Any) -> Offsets:
        ends = self.line_ends(content)
        starts = np.concatenate([[0], ends[:-1]])[: len(ends)].astype(np.int64)
        short = np.flatnonzero(ends - starts <= 2)
        blank = [at for at in short.tolist() if not content[int(starts[at]) : int(ends[at])].strip()]
        kept = np.delete(starts, blank)
        return np.append(kept, len(content)) if len(kept) else np.zeros(1, dtype=np.int64)

    def row(self, number: int) -> Row:
        try:
            line = self.bytes_of(number).partition(b"\n")[0].removesuffix(b"\r")  # without blank ones behind it
            return {"text": line.decode("utf-8" if number else "utf-8-sig")}
        except UnicodeDecodeError as error:
            raise BadRow(f"it is no UTF-8: {error}") from error


class JsonLines(Text):
    """JSON objects, one a line."""

    def row(self, number: int) -> Row:
        try:
            found = json.loads(self.bytes_of(number))
        except ValueError as error:
            raise BadRow(f"it is no JSON: {error}") from error
        if not isinstance(found, dict):
            raise BadRow(f"it is a JSON {type(found).__name__}, not an object")
        return found


class Csv(Records):
    """Rows of a table whose first line names the columns; a field may hold newlines in quotes.

    Its columns have types once :meth:`typed` was called; as long as they have not, each field is what it looks like.
    """

    def scan(self, content: Any) -> Offsets:
        ends = self.line_ends(content)
        if not len(ends):
            raise BadShard("it is empty, and a csv file begins with a line that names its columns")
        quotes = _quotes(content)
        # Within quotes a line ends no row; a quote in a field is doubled.
        ends = _parsed_ends(content, ends) if quotes is None else ends[np.searchsorted(quotes, ends) % 2 == 0]
        header = content[: int(ends[0])].decode("utf-8-sig")
        names = [name.strip() for name in next(csv.reader([header]))]
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
        return {name: of(field.strip()) for (name, of), field in zip(self._values, fields, strict=True)}

    def typed(self, columns: Mapping[str, str]) -> None:
        """Take these types of columns, as an index has them."""
        self.columns = columns
        self._values = [(name, _OF_TYPE.get(kind, _number)) for name, kind in columns.items()]

    def found_types(self) -> dict[str, str]:
        """Return the types of the columns, from all of their fields."""
        found = dict.fromkeys(self.columns, TYPES[0])
        first = 0
        while first < len(self):
            last = max(first + 1, int(np.searchsorted(self.offsets, self.offsets[first] + _CHUNK)) - 1)
            start, stop = int(self.offsets[first]), int(self.offsets[last])
            kinds = _types_of(os.pread(self._file, stop - start, start), [*self.columns])
            found = {name: wider(found[name], kind) for name, kind in zip(found, kinds, strict=True)}
            first = last
        return found


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
    for first in range(begin, len(content), _CHUNK):
        # With the bytes before and behind it; those of the file are between ends of lines.
        before = b"\n" if first == begin else content[first - 1 : first]
        around = np.frombuffer(before + content[first : first + _CHUNK + 1] + b"\n", dtype=np.uint8)
        at = np.flatnonzero(around[1 : 1 + min(_CHUNK, len(content) - first)] == ord('"'))
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


class Tar(Records):
    """Samples of a tar file as webdataset has them: files in a row with one name but for what follows its first dot."""

    def scan(self, content: Any) -> Offsets:
        starts: list[int] = []
        last, end = None, 0
        if not content:
            raise BadShard("it is empty")
        try:
            with tarfile.open(fileobj=content, mode="r:") as file:
                for member in file:
                    key, suffix = _key(member.name)
                    if not member.isfile() or not suffix:
                        continue
                    if key != last:
                        starts.append(member.offset)
                    last, end = key, member.offset_data + -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
        except tarfile.TarError as error:
            raise BadShard(f"it is no tar file: {error}") from error
        if end > len(content):
            raise BadShard("it is cut short: a file in it goes on behind its end")
        return np.array([*starts, end], dtype=np.int64)

    def row(self, number: int) -> Row:
        content = self.bytes_of(number)
        try:
            return _plain_members(content) or _members(content)
        except tarfile.TarError as error:
            raise BadRow(f"it is no part of a tar file: {error}") from error


def _plain_members(content: bytes) -> Row:
    """Return the files in a part of a tar file; nothing where others than plain ones are in it."""
    found: Row = {}
    at = 0
    while at < len(content):
        member = tarfile.TarInfo.frombuf(content[at : at + tarfile.BLOCKSIZE], "utf-8", "surrogateescape")
        if not member.isreg() or member.type == tarfile.GNUTYPE_SPARSE:
            return {}
        key, suffix = _key(member.name)
        at += tarfile.BLOCKSIZE
        if suffix:
            found["__key__"], found[suffix] = key, content[at : at + member.size]
        at += -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
        if at > len(content):
            raise tarfile.ReadError("unexpected end of data")
    return found


def _members(content: bytes) -> Row:
    """Return the same of any part, which takes some times as long."""
    found: Row = {}
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as file:
        for member in file:
            key, suffix = _key(member.name)
            if suffix and member.isfile() and (inside := file.extractfile(member)) is not None:
                found["__key__"], found[suffix] = key, inside.read()
    return found


def _key(name: str) -> tuple[str, str]:
    """Return the name of the sample that a file is of, and of the file in it; that is empty where it is of none.

    So are hidden files, of which macOS puts one before each, and those without a suffix.
    """
    folder, slash, file = name.rpartition("/")
    stem, _, suffix = file.partition(".")
    return f"{folder}{slash}{stem}", suffix.lower() if stem else ""


class Formats:
    """Formats by the suffixes of their files."""

    RECORDS: ClassVar[dict[str, type[Records]]] = {
        ".jsonl": JsonLines,
        ".ndjson": JsonLines,
        ".csv": Csv,
        ".txt": Text,
        ".tar": Tar,
    }
    NAMES = (".parquet", ".arrow", *RECORDS)

    @classmethod
    def of(cls, name: str) -> str | None:
        """Return the suffix that says a file's format, without that of its compression; None for any other file.

        After it there may be what a signed address has: ``a.parquet?Signature=…``.
        """
        for each in (name, name.partition("?")[0]):
            stem, suffix = os.path.splitext(each)
            suffix = (os.path.splitext(stem)[1] if suffix in COMPRESSIONS else suffix).lower()
            if suffix in cls.NAMES:
                return suffix
        return None

    @classmethod
    def open(cls, path: Path, suffix: str, groups: Groups, only: Sequence[str] | None = None) -> Any:
        """Return the reader of a file that is not compressed.

        Raises:
            BadShard: it is not of that format.
            RequestError: there is no such format, or its library is missing.
        """
        if suffix == ".parquet":
            return Parquet(path, groups, only)
        if suffix == ".arrow":
            return Arrow(path, only)
        if suffix not in cls.RECORDS:
            raise not_one_of("the suffix of a shard", suffix, cls.NAMES)
        return cls.RECORDS[suffix](path)


def decompressed(source: Any, suffix: str) -> Iterator[bytes]:
    """Yield the content of an open file that is compressed as its suffix says, in chunks.

    Raises:
        BadShard: it is damaged or cut short.
    """
    import gzip
    import zlib

    if suffix == ".gz":
        try:
            with gzip.GzipFile(fileobj=source, mode="rb") as file:
                while chunk := file.read(1 << 20):
                    yield chunk
        except (OSError, EOFError, zlib.error) as error:
            raise BadShard(f"it cannot be decompressed: {error}") from error
        return
    zstandard = needed("zstandard")
    try:
        with zstandard.ZstdDecompressor().stream_reader(source, read_across_frames=True) as file:
            while chunk := file.read(1 << 20):
                yield chunk
    except zstandard.ZstdError as error:
        raise BadShard(f"it cannot be decompressed: {error}") from error
