"""A checkpoint on its way to the disk: put together in memory of its own, written from there past the page cache.

Both save time that a training loop would have to give. A copy into memory that was used before takes a tenth of one
into new memory, or less, and a write that the disk fetches by itself a tenth of the processor's time of one through the
page cache.
"""

import errno
import fcntl
import io
import mmap
import os
import zipfile
import zlib
from collections.abc import Iterator
from struct import unpack_from
from typing import Any, BinaryIO

import torch
from torch.serialization import get_crc32_options, set_crc32_options

BLOCK = 4 << 20  # bytes, a multiple of the disk's own blocks: what goes past the page cache has to be
DIRECT = getattr(os, "O_DIRECT", 0)


class Staging(io.RawIOBase, BinaryIO):
    """What ``torch.save`` writes a file to. Its memory, blocks that begin at pages, is kept from file to file."""

    def __init__(self) -> None:
        self._blocks: list[mmap.mmap] = []  # shared with forks, data workers say: writing copies no page
        self._file: BinaryIO | None = None  # where full blocks go; none: all are kept
        self._begin(None)

    def save(self, content: Any, file: BinaryIO) -> None:
        """Write content to a new file, with no more than a block of it in memory.

        Raises:
            OSError: the file cannot be written.
        """
        self._begin(file)
        torch.save(content, self)
        self._drain(file)

    def hold(self, content: Any) -> None:
        """Copy content, all of it, into the memory, as it will be in the file: it may change afterwards."""
        self._begin(None)
        checksums = get_crc32_options()
        set_crc32_options(False)  # they take longer than the copy, and do not need the content as it is now
        try:
            torch.save(content, self)
        finally:
            set_crc32_options(checksums)

    def release(self, file: BinaryIO) -> None:
        """Write what is held to a new file, each block as soon as the checksums in it are there.

        So the processor, which training wants, is busy for moments, between which it waits for the disk.

        Raises:
            OSError: the file cannot be written.
        """
        written = 0  # blocks
        for complete in self._fill_in_checksums():
            while written < complete // BLOCK:
                self._put_out(file, written, BLOCK)
                written += 1
        self._drain(file, written)

    def _begin(self, file: BinaryIO | None) -> None:
        self._file = file
        if file is not None:
            del self._blocks[1:]
        self._blocks = self._blocks or [mmap.mmap(-1, BLOCK)]
        self._index = self._used = 0  # the block that is being filled, and the bytes in it
        self._gone = 0  # bytes that went to the file already
        self._position = 0  # of the next read

    @property
    def _end(self) -> int:
        """The length of the file so far."""
        return self._gone + self._index * BLOCK + self._used

    # --- what torch.save needs of a file

    def write(self, data: Any) -> int:
        """Append bytes. Thousands of times a file, so what fits into the block takes the short way."""
        size = len(data)
        if size > BLOCK - self._used:
            data = memoryview(data)
            while len(data) > (room := BLOCK - self._used):
                self._blocks[self._index][self._used :] = data[:room]
                self._used = BLOCK
                data = data[room:]
                self._next_block()
        used = self._used + len(data)
        self._blocks[self._index][self._used : used] = data
        self._used = used
        return size

    def _next_block(self) -> None:
        if self._file is not None:
            self._put_out(self._file, 0, BLOCK)
            self._gone += BLOCK
        else:
            self._index += 1
            if self._index == len(self._blocks):
                self._blocks.append(mmap.mmap(-1, BLOCK))
        self._used = 0

    # --- checksums, which the file format has a place for

    def _fill_in_checksums(self) -> Iterator[int]:
        """Give each record of the zip file its CRC-32: in the central directory, and behind the record itself.

        Yields:
            How many bytes from the beginning are as they will be.
        """
        with zipfile.ZipFile(self) as archive:
            entry = archive.start_dir
            for record in archive.infolist():
                name, extra = unpack_from("<HH", self._bytes(record.header_offset, 30), 26)
                begin = record.header_offset + 30 + name + extra
                end, checksum = begin + record.file_size, 0
                for part in self._parts(begin, end):
                    checksum = zlib.crc32(part, checksum)
                    begin += len(part)
                    yield begin
                self._replace(entry + 16, checksum)
                self._replace(end + 4, checksum)
                entry += 46 + sum(unpack_from("<HHH", self._bytes(entry, 46), 28))

    def _replace(self, position: int, number: int) -> None:
        """Put a number of 32 bits at a place of what is held."""
        rest = number.to_bytes(4, "little")
        for part in self._parts(position, position + 4):
            part[:] = rest[: len(part)]
            rest = rest[len(part) :]

    def _parts(self, begin: int, end: int) -> Iterator[memoryview]:
        """Yield the memory that holds a part of the file."""
        while begin < end:
            index, used = divmod(begin, BLOCK)
            count = min(end - begin, BLOCK - used)
            yield memoryview(self._blocks[index])[used : used + count]
            begin += count

    def _bytes(self, position: int, count: int) -> bytes:
        return b"".join(self._parts(position, min(position + count, self._end)))

    # --- what zipfile needs of a file

    def readable(self) -> bool:
        """Return that it is."""
        return True

    def seekable(self) -> bool:
        """Return that it is."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the place of the next read."""
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._end}[whence]
        return self._position

    def tell(self) -> int:
        """Return the place of the next read."""
        return self._position

    def read(self, size: int = -1) -> bytes:
        """Return bytes of what is held."""
        found = self._bytes(self._position, self._end if size < 0 else size)
        self._position += len(found)
        return found

    # --- to the disk

    def _drain(self, file: BinaryIO, first: int = 0) -> None:
        """Write what is there, from a block on."""
        for index in range(first, self._index):
            self._put_out(file, index, BLOCK)
        self._put_out(file, self._index, self._used)

    def _put_out(self, file: BinaryIO, index: int, size: int) -> None:
        """Write a block, or the beginning of one."""
        rest = memoryview(self._blocks[index])[:size]
        direct = _past_the_page_cache(file, size == BLOCK)  # no less than whole pages can be
        while rest:
            try:
                rest = rest[os.write(file.fileno(), rest) :]
            except OSError as error:
                if error.errno != errno.EINVAL or not direct:
                    raise
                direct = _past_the_page_cache(file, False)  # the disk has blocks of another size


def _past_the_page_cache(file: BinaryIO, wanted: bool) -> bool:
    """Have writes go past the page cache, or not; return whether they do: some file systems have no such way."""
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
