"""The writer interface behind which a checkpoint becomes a file, and what is said where it cannot be written."""

import errno
import io
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from ddp_recipes._compat.messages import refused_global
from ddp_recipes.errors import RecipeError, chain
from ddp_recipes.runtime.files import Save


class Writer(Protocol):
    """Stages the content of a checkpoint for a file. The file is a zip file with right checksums."""

    def stage(self, content: dict[str, Any], snapshot: bool) -> Save:
        """Return what writes the content to a new file; after a ``snapshot`` the content may change before that."""


class PlainWriter:
    """``torch.save``; a snapshot is the file in memory."""

    def stage(self, content: dict[str, Any], snapshot: bool) -> Save:
        """Return what writes the content to a new file."""
        if not snapshot:
            return partial(torch.save, content)
        memory = io.BytesIO()
        torch.save(content, memory)
        return lambda file: file.write(memory.getbuffer())


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
            path, free = os.fsdecode(cause.filename or directory), shutil.disk_usage(directory).free
            return RecipeError(
                f"{path} could not be written: {cause.strerror}. Free on that disk: {free:,} bytes. Make room "
                f"(df -h and df -i show it), and go on with the same hydra.run.dir and ckpt_path=auto."
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
