"""Shards by columns: rows of parquet and Arrow files."""

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddp_recipes.streams.reader import BadRow, BadShard, Part, Row, needed, span


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
    """Return names and types of columns; of types that only a library knows, once it is loaded, those below them.

    Raises:
        BadShard: two have one name.
    """
    extension = needed("pyarrow").ExtensionType
    types = {field.name: field.type for field in schema}
    if twice := [name for name in types if schema.names.count(name) > 1]:
        raise BadShard(f"it has two columns '{twice[0]}'")
    return {name: str(kind.storage_type if isinstance(kind, extension) else kind) for name, kind in types.items()}


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
        try:
            return {name: get(number) for name, get in self._columns}
        except (ValueError, OverflowError) as error:  # a text that is no UTF-8, a date that Python has not
            raise BadRow(f"it holds what cannot be read: {error}") from error


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
    # Of views elements may lie in any order, and what is encoded by its runs has no lists.
    others = hasattr(column, "sizes") or hasattr(column, "run_ends")
    if elements is None or others or column.null_count or elements.null_count or not _is_numeric(elements.type):
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
    elements, kind = getattr(value, "values", None), _number_in(value.type)
    if elements is None or kind is None:  # null, or no list of numbers
        return value.as_py()
    if hasattr(elements, "to_numpy") and _is_numeric(elements.type):
        if not elements.null_count or kind.kind == "f":
            return _own(elements.to_numpy(zero_copy_only=False), shape)
        return value.as_py()  # there is no such number for a null
    try:
        return _own(np.array(value.as_py(), dtype=kind), shape)
    except (TypeError, ValueError):  # of no shape, or with nulls
        return value.as_py()


def _number_in(kind: Any) -> np.dtype[Any] | None:
    """Return the type of the numbers in lists, or in lists of lists."""
    types = needed("pyarrow.types")
    lists = (types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_list_view, types.is_large_list_view)
    while any(test(kind) for test in lists):
        kind = kind.value_type
    return np.dtype(kind.to_pandas_dtype()) if _is_numeric(kind) else None


def _own(values: NDArray[Any], shape: Sequence[int] | None) -> NDArray[Any]:
    """Return values with own memory: a tensor, or a list, whose floats are float32 as Python's are in a batch."""
    if shape is not None:
        return values.reshape(shape).copy()
    return values.astype(np.float32 if values.dtype == np.float64 else values.dtype)


def _is_numeric(kind: Any) -> bool:
    types = needed("pyarrow.types")
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))
