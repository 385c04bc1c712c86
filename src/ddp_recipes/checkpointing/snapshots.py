"""Copies of what is to be written, which lets training go on meanwhile: ``checkpoint.async_save``."""

import io
import mmap
import os
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from struct import pack_into, unpack_from
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.serialization import get_crc32_options, set_crc32_options

from ddp_recipes import devices
from ddp_recipes._compat.torch_ import bytes_of, tree_flatten, tree_unflatten
from ddp_recipes.checkpointing.writing import BLOCK, saved, size_of, write_block
from ddp_recipes.runtime.files import Save
from ddp_recipes.runtime.tensors import place_of

_APART = 64  # bytes: where a tensor of any dtype may begin
_SUM_BEHIND = 1 << 3  # a flag of a record of a zip file: its checksum follows it


@dataclass(frozen=True)
class Content:
    """What is to be written.

    Attributes:
        value: nested plain data and tensors.
        events: that devices come by once the copies of what is on them are there; none where nothing was copied.
    """

    value: Any
    events: Sequence[torch.Event] = ()

    def wait(self) -> None:
        """Wait until the copies are there; any thread may."""
        for event in self.events:
            event.synchronize()


class HostCopies:
    """Keeps page-locked memory from checkpoint to checkpoint, into which devices copy without anyone waiting for them.

    Copies are enqueued behind what a device has to do already, and before the next step's work: so whatever code writes
    to a tensor from now on, its copy has the value of now. The device itself is held up for as long as they take.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, value: Any) -> Content:
        """Begin to copy nested plain data and tensors to the host. The copies of the time before are overwritten.

        Nothing is copied where nothing of it is on an accelerator.
        """
        leaves, structure = tree_flatten(value)
        away = {place_of(each): each for each in leaves if _is_away(each)}
        if not away:
            return Content(value)
        copies = self._copied(away)
        taken = [
            copies[place_of(each)] if _is_away(each) else each.clone() if isinstance(each, Tensor) else each
            for each in leaves
        ]
        return Content(
            tree_unflatten(taken, structure),
            [devices.record(device) for device in {each.device for each in away.values()}],
        )

    def _copied(self, away: dict[Any, Tensor]) -> dict[Any, Tensor]:
        """Return a copy of each tensor, which is to come, in a storage of its own: ``torch.save`` writes whole ones."""
        sizes = [-(-each.nbytes // _APART) * _APART for each in away.values()]
        if sum(sizes) > len(self._memory):
            self._memory = devices.page_locked(sum(sizes))
        room: Any = self._memory.numpy()
        begin, copies = 0, {}
        for (place, each), size in zip(away.items(), sizes, strict=True):
            copy = torch.empty(0, dtype=torch.uint8)
            if each.nbytes:
                copy = torch.frombuffer(room, dtype=torch.uint8, count=each.nbytes, offset=begin)
                copy.copy_(bytes_of(each), non_blocking=True)
            copies[place] = copy.view(each.dtype).view(each.shape)
            begin += size
        return copies


def _is_away(value: Any) -> bool:
    return isinstance(value, Tensor) and devices.is_accelerator(value.device)


class Snapshot(io.RawIOBase, BinaryIO):
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
        self._position = offset + (0, self._position, self._end)[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        found = self._memory[self._position : min(self._position + len(buffer), self._end)]
        buffer[: len(found)] = found
        self._position += len(found)
        return len(found)

    def blocks(self) -> Iterator[memoryview]:
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
                write_block(file, content[written : written + BLOCK])
                written += BLOCK
        for at in range(written, self._end, BLOCK):
            write_block(file, content[at : at + BLOCK])

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


class Stages:
    """Keeps the memory of its snapshots from file to file: in the end a snapshot is copied, or on its way to be."""

    def __init__(self) -> None:
        self.snapshot, self._copies = Snapshot(), HostCopies()

    def taken(self, content: Any, snapshot: bool) -> tuple[Content, bool]:
        """Return what is to be written, and whether it still has to be copied before it changes."""
        taken = self._copies.take(content) if snapshot else Content(content)
        return taken, snapshot and not taken.events


class Snapshots(Stages):
    """Files by ``torch.save``."""

    def staged(self, content: dict[str, Any]) -> Save:
        """Return what writes the content, as it is now, to a new file."""
        taken, copies = self.taken(content, snapshot=True)
        if not copies:

            def write(file: BinaryIO) -> None:
                taken.wait()
                saved(taken.value, file)

            return write
        self.snapshot.clear(size_of(content))
        checksums = get_crc32_options()
        set_crc32_options(False)  # they take longer than the copy, and can be computed later
        try:
            torch.save(content, self.snapshot)
        finally:
            set_crc32_options(checksums)
        return self.snapshot.write_to
