"""How a checkpoint becomes a file, and what is said where it cannot be written."""

import errno
import fcntl
import io
import mmap
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch

from ddp_recipes._compat.messages import refused_global
from ddp_recipes.devices import saving_through_page_locked
from ddp_recipes.errors import RecipeError, chain
from ddp_recipes.runtime.files import Save

if TYPE_CHECKING:
    from ddp_recipes.checkpointing.snapshots import Snapshots


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
DIRECT = getattr(os, "O_DIRECT", 0)


class StagingWriter:
    """Writes files by ``torch.save``: zip files with right checksums."""

    def __init__(self) -> None:
        self._snapshots: Snapshots | None = None  # once there is one

    def stage(self, content: dict[str, Any], snapshot: bool) -> Save:
        """Return what writes the content to a new file; after a ``snapshot`` the content may change before that."""
        if not snapshot:
            return partial(saved, content)
        from ddp_recipes.checkpointing.snapshots import Snapshots

        self._snapshots = self._snapshots or Snapshots()
        return self._snapshots.staged(content)


def saved(content: Any, file: BinaryIO) -> None:
    """Write nested plain data and tensors to a file."""
    blocks = Blocks(file)
    with saving_through_page_locked():
        torch.save(content, blocks)
    blocks.finish()


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
            write_block(self._file, memoryview(self._block))
            self._used, data = 0, data[room:]
        end = self._used + len(data)
        self._block[self._used : end] = data
        self._used = end
        return size

    def finish(self) -> None:
        """Write the rest."""
        write_block(self._file, memoryview(self._block)[: self._used])


def write_block(file: BinaryIO, block: memoryview) -> None:
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
