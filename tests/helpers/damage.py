"""What becomes of files: bytes change, ends are lost, or something else is in their place."""

import os
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path


def flipped(path: Path) -> None:
    """Change a bit of the largest record of a zip file, else one in the middle, under all names of the file.

    Between the records of a zip file, torch leaves bytes that hold nothing (one in ten of a small model's file): the
    middle of the file may be one of them, and what is changed there is no damage.
    """
    content = path.read_bytes()
    at = len(content) // 2
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            record = archive.read(max(archive.infolist(), key=lambda each: each.file_size))
        at = content.index(record) + len(record) // 2
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes([content[at] ^ 4]))


def cut(path: Path) -> None:
    """Cut off the last hundred bytes, under all names of the file."""
    os.truncate(path, max(0, path.stat().st_size - 100))


def replaced(by: Callable[[Path], object]) -> Callable[[Path], None]:
    """Return what puts something else in the place of a file, which keeps its other names."""

    def replace(path: Path) -> None:
        path.unlink()
        by(path)

    return replace


IN_PLACE: dict[str, Callable[[Path], None]] = {"a bit flipped": flipped, "cut short": cut}
OTHERS: dict[str, Callable[[Path], None]] = {
    "deleted": Path.unlink,
    "a pipe": replaced(os.mkfifo),
    "a folder": replaced(Path.mkdir),
    "a device": replaced(lambda path: path.symlink_to("/dev/zero")),
}
DAMAGE = {**IN_PLACE, **OTHERS}


def copied(folder: Path, to: Path) -> Path:
    """Copy a folder, in which two names of a file stay names of one."""
    subprocess.run(["cp", "-a", str(folder), str(to)], check=True)
    return to
