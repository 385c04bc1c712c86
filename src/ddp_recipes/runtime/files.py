"""Files that are complete or absent, and that nobody else can have put in the place of ours. Loads no torch."""

import errno
import io
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

Save = Callable[[BinaryIO], object]

LACKING = (errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOLCK, errno.EMLINK)


def open_file(path: Path) -> io.FileIO:
    """Open a file to read it, unless something else is there: a pipe would be waited for, a device has no end.

    Raises:
        OSError: it cannot be read, or is no regular file.
    """
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return io.FileIO(file)


def read_text(path: Path) -> str:
    """Return the text of a file; newlines stay what they are.

    Raises:
        OSError: it cannot be read, or is no regular file.
        UnicodeDecodeError: it is no text.
    """
    with open_file(path) as file:
        return file.readall().decode()


def write_aside(path: Path, save: Save, link: Callable[[], object] = lambda: None, durable: bool = True) -> None:
    """Let ``save`` write a file so that it is complete at ``path`` or not there at all.

    Args:
        link: gives it further names in its folder, which become durable together with it.
        durable: whether it outlives a power failure once this returns.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.part")
    aside.unlink(missing_ok=True)  # of a save that was killed, or a symbolic link to elsewhere
    try:
        with aside.open("xb") as file:
            save(file)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    link()
    if durable:
        _sync_folder(path.parent)


def write_over(path: Path, content: bytes) -> bool:
    """Write a small file, which JSON with spaces at its end is, into the blocks of the one that is there.

    In one call, so that it is complete or as before. Returns whether there is one, of so many blocks.
    """
    with suppress(OSError):
        file = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            former = os.fstat(file)
            if len(content) > former.st_blocks * 512:
                return False
            padded = content.ljust(former.st_size)
            written = os.pwrite(file, padded, 0) == len(padded)
            os.fsync(file)
            return written
        finally:
            os.close(file)
    return False


def _sync_folder(path: Path) -> None:
    """Make the renames in a folder durable, where its file system can."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in LACKING:
            raise
    finally:
        os.close(folder)
