"""What becomes of files: bytes change, ends are lost, or something else is in their place."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path


def flipped(path: Path) -> None:
    """Change a bit in the middle, under all names of the file."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 4]))


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
