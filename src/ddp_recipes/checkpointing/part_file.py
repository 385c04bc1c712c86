"""A part of a checkpoint as it is read: verified first, and not read again by a rank that verified what it loads."""

import io
import json
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddp_recipes.checkpointing.tensors_file import DTYPES
from ddp_recipes.runtime.files import open_file

CHUNK = 1 << 20  # bytes: what was read is still in the processor's cache when its checksum is computed


class DamagedParts(ValueError):
    """What is wrong with an index or with a part."""


@dataclass
class PartFile:
    """A safetensors file that a rank wrote. It is read into the memory that is to hold what is in it, not mapped.

    Attributes:
        path: of the file.
        rank: that wrote it.
        size: in bytes.
        checksum: its CRC-32.
        begin: where it begins in what ``source`` opens, if it is elsewhere than at its path.
    """

    path: Path
    rank: int
    size: int
    checksum: int
    begin: int = 0
    source: Callable[[], io.RawIOBase] | None = None
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
        except OSError as error:
            return f"{who} is missing" if isinstance(error, FileNotFoundError) else f"{who}: {error.strerror}"
        return None if found == self.checksum else f"{who} does not match its checksum"

    def _memory(self, keep: bool) -> Iterator[memoryview]:
        """Yield memory, each to be filled from the file before the next is asked for."""
        if keep:
            with suppress(ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
                yield from self._memory_to_keep()  # a damaged header fails in any way: see the checksum
        scratch = memoryview(bytearray(CHUNK))
        while True:
            yield scratch

    def _memory_to_keep(self) -> Iterator[memoryview]:
        yield (length := memoryview(bytearray(8)))
        yield (header := memoryview(bytearray(min(int.from_bytes(length, "little"), self.size))))
        entries: dict[str, Any] = json.loads(bytes(header))
        entries.pop("__metadata__", None)
        spans = sorted((*entry["data_offsets"], name) for name, entry in entries.items())
        edges = [0, *(edge for span in spans for edge in span[:2]), self.size - 8 - len(header)]
        if edges[::2] != edges[1::2]:
            raise ValueError
        for low, high, name in spans:
            values = torch.empty(entries[name]["shape"], dtype=DTYPES[entries[name]["dtype"]])
            if values.nbytes != high - low:
                raise ValueError
            self._kept[name] = values
            yield _bytes(values)

    def take(self, name: str) -> Tensor | None:
        """Hand over all that the file has of a tensor, if it was kept; not a second time."""
        return self._kept.pop(name, None)

    def read(self, name: str, row: int, into: Tensor) -> Tensor:
        """Fill memory with the file's rows of a tensor, from a row on."""
        if (kept := self.take(name)) is not None:
            return into.copy_(kept[row : row + len(into)])
        if not into.numel():
            return into
        begin, header = self._header
        at = begin + header[name]["data_offsets"][0] + row * (into.nbytes // max(1, len(into)) if into.dim() else 0)
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
        entry = self._header[1][name]
        return self.read(name, 0, torch.empty(entry["shape"], dtype=DTYPES[entry["dtype"]]))

    @cached_property
    def _header(self) -> tuple[int, dict[str, Any]]:
        """Where tensors begin, and what the file says of them."""
        with self._open() as file:
            file.seek(self.begin)
            size = int.from_bytes(file.read(8) or b"", "little")
            return self.begin + 8 + size, json.loads(file.read(size) or b"")

    def _open(self) -> io.RawIOBase:
        return open_file(self.path) if self.source is None else self.source()


def _bytes(values: Tensor) -> memoryview:
    flat: Any = values.reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)
