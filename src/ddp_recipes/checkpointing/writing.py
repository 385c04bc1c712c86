"""How a checkpoint becomes a file, and what is said where it cannot be written."""

import errno
import fcntl
import io
import mmap
import os
import shutil
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from struct import pack_into, unpack_from
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.serialization import get_crc32_options, set_crc32_options

from ddp_recipes import devices
from ddp_recipes._compat.messages import refused_global
from ddp_recipes._compat.torch_ import bytes_of, tree_flatten, tree_unflatten
from ddp_recipes.devices import saving_through_page_locked
from ddp_recipes.errors import RecipeError, chain
from ddp_recipes.runtime.files import Save
from ddp_recipes.runtime.tensors import place_of


@contextmanager
def unwritable(path: Path, size: int) -> Iterator[None]:
    """Name the file, the cause, the bytes needed and those free where writing fails.

    Raises:
        RecipeError: in the place of the error of the system or of torch.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        there = next(folder for folder in path.parents if folder.exists())
        other = getattr(error, "filename2", None) or path  # that it was to be renamed to, or linked
        where = "" if Path(os.fsdecode(other)) == path else f" ({os.fsdecode(other)})"
        raise RecipeError(
            f"{path} could not be written: {reason_of(error)}{where}. It needs about {size:,} bytes; "
            f"free on that disk: {shutil.disk_usage(there).free:,}. Earlier checkpoints are untouched."
        ) from error


def disk_failure(error: BaseException, directory: Path) -> RecipeError | None:
    """Return the error to show where writing anything else into the run directory failed for want of a disk."""
    for cause in chain(error):
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            path = Path(os.fsdecode(cause.filename or directory))
            free = shutil.disk_usage(path.parent if path.parent.exists() else directory).free
            return RecipeError(
                f"{path} could not be written: {cause.strerror}. Free on that disk: {free:,} bytes. Make room "
                f"(df -h and df -i show it), and go on with the same hydra.run.dir and ckpt_path=auto."
            )
    return None


def removed(error: BaseException, directory: Path) -> RecipeError | None:
    """Return the error to show where something could not be written for the run directory is there no longer."""
    for cause in chain(error):
        if isinstance(cause, FileNotFoundError) and not (directory / "config.yaml").exists():
            path = Path(os.fsdecode(cause.filename or ""))
            if path.is_relative_to(directory):
                return RecipeError(
                    f"{path} could not be written: the run directory has been removed, or moved, while the run went "
                    f"on. Where it was moved, the run goes on from there: hydra.run.dir=… ckpt_path=auto."
                )
    return None


def size_of(content: Any) -> int:
    """Return the bytes that nested plain data and tensors take, about."""
    if isinstance(content, torch.Tensor):
        return content.nbytes
    if isinstance(content, Mapping):
        return sum(size_of(value) for value in content.values())
    return sum(size_of(value) for value in content) if isinstance(content, (list, tuple)) else 8


def reason_of(error: Exception) -> str:
    """Return the system's message (torch calls a failed write an unexpected position), or what was not read."""
    for cause in chain(error):
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
    # torch goes on to say how to load it all the same, which is no advice for a file that came from elsewhere.
    refused = refused_global(error)
    return f"it names {refused}" if refused else (str(error) or type(error).__name__).split(". ")[0].splitlines()[0]


BLOCK = 4 << 20  # bytes, a multiple of the disk's own blocks: direct writes have to be
_APART = 64  # bytes: where a tensor of any dtype may begin


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


DIRECT = getattr(os, "O_DIRECT", 0)
_SUM_BEHIND = 1 << 3  # a flag of a record of a zip file: its checksum follows it


class Stages:
    """Keeps the memory of its snapshots from file to file: in the end a snapshot is copied, or on its way to be."""

    def __init__(self) -> None:
        self._snapshot, self._copies = _Snapshot(), HostCopies()

    def _taken(self, content: Any, snapshot: bool) -> tuple[Content, bool]:
        """Return what is to be written, and whether it still has to be copied before it changes."""
        taken = self._copies.take(content) if snapshot else Content(content)
        return taken, snapshot and not taken.events


class StagingWriter(Stages):
    """Writes files by ``torch.save``: zip files with right checksums."""

    def stage(self, content: dict[str, Any], snapshot: bool) -> Save:
        """Return what writes the content to a new file; after a ``snapshot`` the content may change before that."""
        taken, copies = self._taken(content, snapshot)

        def write(file: BinaryIO) -> None:
            taken.wait()
            blocks = Blocks(file)
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


class Blocks(io.RawIOBase, BinaryIO):
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
