"""A writer that saves the training loop time: it stages checkpoints in its own memory and bypasses the page cache.

A copy into memory that was used before takes a tenth of one into new memory, or less, and a direct write a tenth of the
processor time of one through the page cache. Nothing else depends on this module: ``PlainWriter`` can take its place.
"""

import errno
import fcntl
import io
import mmap
import os
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from struct import pack_into, unpack_from
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.serialization import get_crc32_options, set_crc32_options

from ddp_recipes.checkpointing.host_copies import Content, HostCopies
from ddp_recipes.checkpointing.tensors_file import BLOCK, stream
from ddp_recipes.checkpointing.writing import size_of
from ddp_recipes.devices import saving_through_page_locked
from ddp_recipes.runtime.files import Save
from ddp_recipes.runtime.rows import Source

DIRECT = getattr(os, "O_DIRECT", 0)
_SUM_BEHIND = 1 << 3  # a flag of a record of a zip file: its checksum follows it


class _Stages:
    """Keeps the memory of its snapshots from file to file: in the end a snapshot is copied, or on its way to be."""

    def __init__(self) -> None:
        self._snapshot, self._copies = _Snapshot(), HostCopies()

    def _taken(self, content: Any, snapshot: bool) -> tuple[Content, bool]:
        """Return what is to be written, and whether it still has to be copied before it changes."""
        taken = self._copies.take(content) if snapshot else Content(content)
        return taken, snapshot and not taken.events


class StagingWriter(_Stages):
    """Writes files by ``torch.save``."""

    def stage(self, content: dict[str, Any], snapshot: bool) -> Save:
        """Return what writes the content to a new file."""
        taken, copies = self._taken(content, snapshot)

        def write(file: BinaryIO) -> None:
            taken.wait()
            blocks = _Blocks(file)
            with saving_through_page_locked():
                torch.save(taken.value, blocks)
            blocks.finish()

        if not copies:
            return write
        self._snapshot.clear(size_of(content))
        checksums = get_crc32_options()
        set_crc32_options(False)  # they take longer than the copy, and can be computed later
        try:
            torch.save(content, self._snapshot)
        finally:
            set_crc32_options(checksums)
        return self._snapshot.write_to


class PieceWriter(_Stages):
    """Writes safetensors files."""

    def stage(
        self, tensors: Mapping[str, Tensor | Source], size: int, snapshot: bool
    ) -> Callable[[BinaryIO], tuple[int, int]]:
        """Return what writes the tensors to a new file, of about ``size`` bytes, and returns its size and CRC-32."""
        taken, copies = self._taken(tensors, snapshot)
        pieces: Iterable[memoryview] = stream(taken.value)
        if copies:
            self._snapshot.clear(size)
            for piece in pieces:
                self._snapshot.write(piece)
            pieces = self._snapshot.blocks()

        def write(file: BinaryIO) -> tuple[int, int]:
            taken.wait()
            blocks, written = _Blocks(file), 0
            with ThreadPoolExecutor(1) as other:  # which computes the checksum of a piece while it is written
                checksum = other.submit(int)
                for piece in pieces:
                    checksum = other.submit(zlib.crc32, piece, checksum.result())
                    blocks.write(piece)
                    written += len(piece)
                blocks.finish()
                return written, checksum.result()

        return write


class _Blocks(io.RawIOBase, BinaryIO):
    """What ``torch.save`` writes to a file through, with no more than a block in memory."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._block, self._used = mmap.mmap(-1, BLOCK), 0

    def write(self, data: Any) -> int:
        """Append bytes; each full block goes to the file."""
        size = len(data)
        while len(data) > (room := BLOCK - self._used):
            data = memoryview(data)
            self._block[self._used :] = data[:room]
            _write_block(self._file, memoryview(self._block))
            self._used, data = 0, data[room:]
        end = self._used + len(data)
        self._block[self._used : end] = data
        self._used = end
        return size

    def finish(self) -> None:
        """Write the rest."""
        _write_block(self._file, memoryview(self._block)[: self._used])


class _Snapshot(io.RawIOBase, BinaryIO):
    """A zip file in memory: ``torch.save`` writes it, ``zipfile`` reads it, and its checksums come last."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, BLOCK)  # shared with forks, such as data workers: writing copies no page
        self._end = self._position = 0

    def clear(self, size: int) -> None:
        """Drop the content, and make room for about so many bytes."""
        self._end = 0
        self._reserve(size + size // 64)

    def _reserve(self, size: int) -> None:
        if size > len(self._memory):
            larger = mmap.mmap(-1, -(-size // BLOCK) * BLOCK)
            larger[: self._end] = memoryview(self._memory)[: self._end]
            self._memory = larger

    def write(self, data: Any) -> int:
        """Append bytes. Called thousands of times a file."""
        size = len(data)
        end = self._end + size
        if end > len(self._memory):
            self._reserve(max(end, self._end + self._end // 2))
        self._memory[self._end : end] = data
        self._end = end
        return size

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the position of the next read."""
        self._position = offset + (0, self._position, self._end)[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Read bytes."""
        found = self._memory[self._position : min(self._position + len(buffer), self._end)]
        buffer[: len(found)] = found
        self._position += len(found)
        return len(found)

    def blocks(self) -> Iterator[memoryview]:
        """Yield the content."""
        content = memoryview(self._memory)[: self._end]
        for at in range(0, self._end, BLOCK):
            yield content[at : at + BLOCK]

    def write_to(self, file: BinaryIO) -> None:
        """Write the file, each block as soon as the checksums in it are there.

        So the processor, which training wants, is busy for moments, between which it waits for the disk.
        """
        content, written = memoryview(self._memory)[: self._end], 0
        for complete in self._fill_in_checksums(content):
            while complete - written >= BLOCK:
                _write_block(file, content[written : written + BLOCK])
                written += BLOCK
        for at in range(written, self._end, BLOCK):
            _write_block(file, content[at : at + BLOCK])

    def _fill_in_checksums(self, content: memoryview) -> Iterator[int]:
        """Give each record of the zip file its CRC-32: in the central directory, and behind the record itself.

        Yields:
            How many bytes from the start are as they will be.
        """
        with zipfile.ZipFile(self) as archive:
            entry = archive.start_dir
            for record in archive.infolist():
                name, extra = unpack_from("<HH", content, record.header_offset + 26)
                begin = record.header_offset + 30 + name + extra
                end, checksum = begin + record.file_size, 0
                for at in range(begin, end, BLOCK):
                    checksum = zlib.crc32(content[at : min(at + BLOCK, end)], checksum)
                    yield min(at + BLOCK, end)
                pack_into("<I", content, entry + 16, checksum)
                if record.flag_bits & _SUM_BEHIND:  # an empty one has none, and the next one follows at once
                    pack_into("<I", content, end + 4, checksum)
                entry += 46 + sum(unpack_from("<HHH", content, entry + 28))


def _write_block(file: BinaryIO, block: memoryview) -> None:
    """Write a block past the page cache, or the end of a file, which is no whole number of pages, through it."""
    direct = _set_direct(file, len(block) == BLOCK)
    while block:
        try:
            block = block[os.write(file.fileno(), block) :]
        except OSError as error:
            if error.errno != errno.EINVAL or not direct:
                raise
            direct = _set_direct(file, False)  # the disk has blocks of another size


def _set_direct(file: BinaryIO, wanted: bool) -> bool:
    """Switch direct writes on or off; return whether they are on: some file systems have none."""
    flags = fcntl.fcntl(file.fileno(), fcntl.F_GETFL)
    changed = flags | DIRECT if wanted else flags & ~DIRECT
    try:
        if changed != flags:
            fcntl.fcntl(file.fileno(), fcntl.F_SETFL, changed)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return changed & DIRECT != 0
