"""A checkpoint in parts: a safetensors file from each rank, and an index in JSON, without which they are worth nothing.

The index is ``step_<8 digits>.json`` (``.pt`` in runs of earlier versions). Its parts are in a folder beside it, whose
name has a part that differs from start to start: no save writes into the files of another one. Nothing is pickled.

A part is verified before it is read. A rank that has verified what it loads does not read it again.
"""

import io
import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from ddp_recipes import devices
from ddp_recipes._compat.torch_ import bytes_of
from ddp_recipes.checkpointing.files import DamagedParts, checksum_of, read_index
from ddp_recipes.checkpointing.reading import Verify
from ddp_recipes.checkpointing.snapshots import Stages
from ddp_recipes.checkpointing.writing import BLOCK, Blocks
from ddp_recipes.runtime.files import open_file
from ddp_recipes.runtime.tensors import OwnRows, Source, below, plain

FORMAT = 3
NAMES = {  # https://github.com/huggingface/safetensors#format
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8"},
    **{torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.bool: "BOOL", torch.complex64: "C64"},
    **{torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64"},
}
DTYPES = {name: dtype for dtype, name in NAMES.items()}


def file_of(rank: int, ranks: int) -> str:
    """Return the name of a rank's part."""
    return f"rank_{rank}_of_{ranks}.safetensors"


def taken_apart(state: Mapping[str, Any]) -> tuple[Any, dict[str, Tensor], dict[str, OwnRows]]:
    """Return a state as JSON, the tensors that it names, and the rows.

    Raises:
        TypeError: it holds more than tensors and plain data.
    """
    tensors: dict[str, Tensor] = {}
    rows: dict[str, OwnRows] = {}
    known: dict[tuple[object, ...], str] = {}  # a tied weight is written once

    def apart(value: Any, name: str) -> Any:
        if isinstance(value, OwnRows):
            held = value.values
            lies = held.data_ptr(), held.dtype, held.stride(), value.shape  # a square and its transpose begin alike
            name = known.setdefault(lies, name) if len(held) else name
            rows[name] = value
            return {"rows": name}
        if isinstance(value, Tensor):
            tensors[name] = value
            return {"tensor": name}
        if isinstance(value, dict):
            return {"dict": [[apart(key, name), apart(inside, below(name, key))] for key, inside in value.items()]}
        if isinstance(value, (list, tuple)):
            items = [apart(inside, below(name, number)) for number, inside in enumerate(value)]
            return items if isinstance(value, list) else {"tuple": items}
        return plain(value, name)

    return apart(dict(state), ""), tensors, rows


@dataclass(frozen=True)
class Part:
    """One file of a checkpoint.

    Attributes:
        file: its name in the checkpoint's folder.
        rank: that wrote it.
        size: in bytes.
        checksum: its CRC-32.
        rows: for each tensor of which it has rows, the first and the one after the last.
    """

    file: str
    rank: int
    size: int
    checksum: int
    rows: Mapping[str, tuple[int, int]] = field(default_factory=dict)


def index(folder: str, tree: Any, rows: Mapping[str, OwnRows], parts: Sequence[Part]) -> bytes:
    """Return the index of a checkpoint, whose parts are all there."""
    content = {
        "format": FORMAT,
        "folder": folder,
        "parts": [[part.file, part.rank, part.size, part.checksum] for part in parts],
        "rows": {
            name: {
                "dtype": NAMES[own.values.dtype],
                "shape": [*own.shape],
                "at": [[number, *part.rows[name]] for number, part in enumerate(parts) if name in part.rows],
            }
            for name, own in rows.items()
        },
        "state": tree,
    }
    text = json.dumps(content).encode()
    return b'{"checksum": "%b", "content": %b}' % (checksum_of(text).encode(), text)


def size_in_file(value: Tensor | Source) -> int:
    """Return the bytes that a tensor takes."""
    return value.shape.numel() * value.dtype.itemsize


def stream(tensors: Mapping[str, Tensor | Source]) -> Iterator[memoryview]:
    """Yield a safetensors file with these tensors piece by piece: the header first, then what is in them.

    A piece may be overwritten once the one after the next is asked for.

    Raises:
        TypeError: the format has no word for a dtype.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))  # so each is aligned
    end = 0
    for name in names:
        value = tensors[name]
        if value.dtype not in NAMES:
            raise TypeError(f"{name} is of {value.dtype}, for which safetensors has no name.")
        begin, end = end, end + size_in_file(value)
        header[name] = {"dtype": NAMES[value.dtype], "shape": [*value.shape], "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    rooms = _Rooms()
    for name in names:
        for piece in _pieces(tensors[name]):
            content = bytes_of(piece)
            for at in range(0, len(content), BLOCK):
                flat: Any = rooms.host(content[at : at + BLOCK]).numpy()
                yield memoryview(flat)


class _Rooms:
    """Two blocks of page-locked memory in turns, through which bytes leave an accelerator."""

    def __init__(self) -> None:
        self._rooms: list[Tensor] = []

    def host(self, content: Tensor) -> Tensor:
        """Return bytes on the host, uint8 [bytes]: those that are there already as they are."""
        if not devices.is_accelerator(content.device):
            return content
        room = self._rooms.pop(0) if len(self._rooms) == 2 else devices.page_locked(BLOCK)
        self._rooms.append(room)
        return room[: len(content)].copy_(content)


def _pieces(value: Tensor | Source) -> Iterator[Tensor]:
    """Yield a tensor, or rows of it that are not in memory yet."""
    if isinstance(value, Tensor):
        yield value
        return
    rows = value.shape[0]
    each = max(1, BLOCK * rows // max(1, size_in_file(value)))
    for start in range(0, rows, each):
        yield value.rows(start, min(start + each, rows))


class PieceWriter(Stages):
    """Writes safetensors files."""

    def stage(
        self, tensors: Mapping[str, Tensor | Source], size: int, snapshot: bool
    ) -> Callable[[BinaryIO], tuple[int, int]]:
        """Return what writes the tensors to a new file, of about ``size`` bytes, and returns its size and CRC-32."""
        taken, copies = self.taken(tensors, snapshot)
        pieces: Iterable[memoryview] = stream(taken.value)
        if copies:
            self.snapshot.clear(size)
            for piece in pieces:
                self.snapshot.write(piece)
            pieces = self.snapshot.blocks()

        def write(file: BinaryIO) -> tuple[int, int]:
            taken.wait()
            blocks, written = Blocks(file), 0
            with ThreadPoolExecutor(1) as other:  # which computes the checksum of a piece while it is written
                checksum = other.submit(int)
                for piece in pieces:
                    checksum = other.submit(zlib.crc32, piece, checksum.result())
                    blocks.write(piece)
                    written += len(piece)
                blocks.finish()
                return written, checksum.result()

        return write


MOST_DIMENSIONS = 64  # of a tensor that torch computes with
CHUNK = 1 << 20  # bytes: what was read is still in the processor's cache when its checksum is computed


class Kind(NamedTuple):
    """What a tensor is, but for its numbers."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, dtype: str, shape: list[int]) -> "Kind":
        """Return what a file says in JSON.

        Raises:
            ValueError: there is no such tensor.
        """
        lengths = len(shape) <= MOST_DIMENSIONS and all(type(each) is int and 0 <= each < 1 << 63 for each in shape)
        if dtype not in DTYPES or not lengths:
            raise ValueError(f"there is no tensor of {dtype} and the shape {shape}")
        return cls(DTYPES[dtype], tuple(shape))

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def empty(self) -> Tensor:
        """Return one whose numbers are still to be filled in."""
        return torch.empty(self.shape, dtype=self.dtype)


def laid_out(header: bytes, size: int) -> dict[str, tuple[Kind, int]]:
    """Return the tensors of a safetensors file, and at which of the bytes after the header each begins.

    Raises:
        ValueError: not each of the ``size`` bytes after it belongs to one of them.
    """
    try:
        entries: dict[str, Any] = json.loads(header)
        entries.pop("__metadata__", None)
        spans = sorted((*entry["data_offsets"], name) for name, entry in entries.items())
        kinds = {name: Kind.of(entry["dtype"], entry["shape"]) for name, entry in entries.items()}
        edges = [0, *(edge for span in spans for edge in span[:2]), size]
        whole = edges[::2] == edges[1::2] and {*map(type, edges)} == {int}
        whole = whole and all(kinds[name].nbytes == high - low for low, high, name in spans)
    except (AttributeError, LookupError, TypeError, RecursionError) as error:
        raise ValueError(f"its header cannot be read ({type(error).__name__})") from None
    if not whole:
        raise ValueError("by its header some of its bytes belong to no tensor, or to several")
    return {name: (kinds[name], low) for low, _, name in spans}


@dataclass
class PartFile:
    """A safetensors file that a rank wrote. It is read into the memory that is to hold what is in it, not mapped.

    Attributes:
        path: of the file.
        rank: that wrote it.
        size: in bytes.
        checksum: its CRC-32.
        begin: where it begins in what ``source`` opens, if it is elsewhere than at its path.
        expected: tensors that it has to have.
    """

    path: Path
    rank: int
    size: int
    checksum: int
    begin: int = 0
    source: Callable[[], io.RawIOBase] | None = None
    expected: dict[str, Kind] = field(default_factory=dict)
    _kept: dict[str, Tensor] = field(default_factory=dict)

    def damage(self, keep: bool) -> str | None:
        """Return what is wrong with the file, ``None`` if nothing is: reads all of it.

        Args:
            keep: whether to hold what is in it until it is asked for.
        """
        who = f"its part {self.path.parent.name}/{self.path.name}, which rank {self.rank} wrote,"
        try:
            with self._open() as file:
                if (size := os.fstat(file.fileno()).st_size) != self.size:
                    return f"{who} has {size:,} bytes, not {self.size:,}"
                found = 0
                for memory in self._memory(keep):
                    left = memory
                    while left and (count := file.readinto(left[:CHUNK])):
                        found = zlib.crc32(left[:count], found)
                        left = left[count:]
                    if left:
                        break
            if found != self.checksum:
                return f"{who} does not match its checksum"
            for name, kind in self.expected.items():
                if name not in self._tensors or self._tensors[name][0] != kind:
                    return f"{who} has not those rows of {name} that the index says"
        except FileNotFoundError:
            return f"{who} is missing"
        except OSError as error:
            return f"{who} cannot be read: {error.strerror}"
        except ValueError as error:
            return f"{who} is none: {error}"
        return None

    def _memory(self, keep: bool) -> Iterator[memoryview]:
        """Yield memory, each to be filled from the file before the next is asked for."""
        if keep:
            with suppress(ValueError):  # a damaged header: see the checksum
                yield from self._memory_to_keep()
        scratch = memoryview(bytearray(CHUNK))
        while True:
            yield scratch

    def _memory_to_keep(self) -> Iterator[memoryview]:
        yield (length := memoryview(bytearray(8)))
        yield (header := memoryview(bytearray(min(int.from_bytes(length, "little"), self.size))))
        for name, (kind, _) in laid_out(bytes(header), self.size - 8 - len(header)).items():
            self._kept[name] = kind.empty()
            yield _bytes(self._kept[name])

    def take(self, name: str) -> Tensor | None:
        """Hand over all that the file has of a tensor, if it was kept; not a second time."""
        return self._kept.pop(name, None)

    def read(self, name: str, row: int, into: Tensor) -> Tensor:
        """Fill memory with the file's rows of a tensor, from a row on."""
        if (kept := self.take(name)) is not None:
            return into.copy_(kept[row : row + len(into)])
        if not into.numel():
            return into
        _, begin = self._tensors[name]
        at = begin + row * (into.nbytes // max(1, len(into)) if into.dim() else 0)
        left = _bytes(into)
        with self._open() as file:
            file.seek(at)
            while left and (count := file.readinto(left)):
                left = left[count:]
        if left:
            raise DamagedParts(f"{self.path} ended early")
        return into

    def tensor(self, name: str) -> Tensor:
        """Return a tensor that is whole in the file."""
        if (kept := self.take(name)) is not None:
            return kept
        if name not in self._tensors:
            raise DamagedParts(f"{self.path} has no tensor {name}")
        return self.read(name, 0, self._tensors[name][0].empty())

    @cached_property
    def _tensors(self) -> dict[str, tuple[Kind, int]]:
        """What is in the file, and where each tensor begins."""
        with self._open() as file:
            file.seek(self.begin)
            length = min(int.from_bytes(file.read(8) or b"", "little"), self.size)
            found = laid_out(file.read(length) or b"", self.size - 8 - length)
        return {name: (kind, self.begin + 8 + length + at) for name, (kind, at) in found.items()}

    def _open(self) -> io.RawIOBase:
        return open_file(self.path) if self.source is None else self.source()


def _bytes(values: Tensor) -> memoryview:
    flat: Any = values.reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


@dataclass(frozen=True)
class Stored:
    """A tensor whose rows are in the parts of a checkpoint."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    at: Sequence[tuple[int, int, int]]  # number of the part, the first of its rows, and the one after the last
    files: Sequence[PartFile]

    def rows(self, start: int, stop: int) -> Tensor:
        for part, *span in self.at:
            if span == [start, stop] and (kept := self.files[part].take(self.name)) is not None:
                return kept
        found = torch.empty(stop - start, *self.shape[1:], dtype=self.dtype)
        for part, first, end in self.at:
            low, high = max(start, first), min(stop, end)
            if low < high:
                self.files[part].read(self.name, low - first, found[low - start : high - start])
        return found


def load(path: Path, verify: Verify, readers: int) -> dict[str, Any]:
    """Return the state that an index describes: tensors, and :class:`Stored` where ranks had rows.

    Args:
        verify: calls each of the given functions once, on some rank, and returns what they return on every rank.
        readers: how many ranks load all of it together: if as many wrote it, each keeps what it verifies in memory,
            for it is most likely what it loads.

    Raises:
        DamagedParts: what is wrong with the index or with a part.
    """
    content = read_index(path)
    if content["format"] > FORMAT:
        return {"format": content["format"]}
    if content["format"] != FORMAT:
        raise DamagedParts(f"it has the format {content['format']}, of which there are none in parts")
    folder, count = path.parent / content["folder"], len(content["parts"])
    if [part[:2] for part in content["parts"]] != [[file_of(rank, count), rank] for rank in range(count)]:
        raise DamagedParts("it names files that are no parts of it")
    files = [PartFile(folder / name, *rest) for name, *rest in content["parts"]]
    rows = dealt(content["rows"], files)
    keep = len(files) == readers
    if problems := [each for each in verify([partial(file.damage, keep) for file in files]) if each]:
        files.clear()  # who has the error would hold what was read
        raise DamagedParts("; ".join(problems))
    state: dict[str, Any] = restored(content["state"], rows, files)
    return {"format": content["format"], **state, "checksum": content["checksum"]}


def dealt(rows: Mapping[str, Any], files: Sequence[PartFile]) -> dict[str, Stored]:
    """Return the tensors whose rows are in parts, which are told what each of them has to have.

    Raises:
        DamagedParts: a row is in no part, or in several.
        ValueError: there is no such tensor.
    """
    found = {}
    for name, entry in rows.items():
        kind, at = Kind.of(entry["dtype"], entry["shape"]), entry["at"]
        edges = [0, *(edge for _, *span in at for edge in span), kind.shape[0]]
        numbers = [number for number, *_ in at]  # rows are dealt in the order of ranks: parts may not trade places
        once = edges[::2] == edges[1::2] and edges == sorted(edges) and {*map(type, edges + numbers)} == {int}
        if not once or numbers != sorted({*numbers}) or not {*numbers} <= {*range(len(files))}:
            spans = ", ".join(f"{first} to {end} in part {number}" for number, first, end in at)
            raise DamagedParts(f"{name} has {kind.shape[0]} rows, and not each is there once: {spans or 'none'}")
        for number, first, end in at:
            if first < end:
                files[number].expected[name] = Kind(kind.dtype, (end - first, *kind.shape[1:]))
        found[name] = Stored(name, torch.Size(kind.shape), kind.dtype, at, files)
    return found


def restored(value: Any, rows: Mapping[str, Stored], files: Sequence[PartFile]) -> Any:
    """Return what :func:`taken_apart` made into JSON."""
    if isinstance(value, list):
        return [restored(inside, rows, files) for inside in value]
    if not isinstance(value, dict):
        return value
    ((kind, inside),) = value.items()
    if kind == "dict":
        return {restored(key, rows, files): restored(of_key, rows, files) for key, of_key in inside}
    if kind == "tuple":
        return tuple(restored(inside, rows, files))
    if kind == "tensor":
        return files[0].tensor(inside)  # only rank 0 wrote it
    return rows[inside]
