"""What a run leaves: read as a user would, and damaged as disks, crashes and people do."""

import json
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

Points = dict[tuple[str, int], list[float]]


def outcome(directory: Path, since: float = 0) -> str | None:
    """Return the status that ``summary.json`` gives, or ``None`` where none was written after that time."""
    path = directory / "summary.json"
    if not path.exists() or path.stat().st_mtime < since:
        return None
    status: str = json.loads(path.read_text())["status"]
    return status


def checkpoints(directory: Path) -> list[Path]:
    """Return the files by step."""
    return sorted((directory / "checkpoints").glob("step_*.pt"))


def saving(directory: Path) -> bool:
    """Whether a checkpoint is being written at this instant."""
    return any((directory / "checkpoints").glob(".step_*.part"))


def flip_byte(path: Path, share: float) -> None:
    """Change one byte, so far into the file."""
    content = bytearray(path.read_bytes())
    content[int(share * len(content))] ^= 0xFF
    with path.open("r+b") as file:  # in place: another name of the file sees it as well
        file.write(content)


def cut_short(path: Path, share: float) -> None:
    """Leave only the first part of a file."""
    with path.open("r+b") as file:
        file.truncate(int(share * path.stat().st_size))


def delete(path: Path, share: float) -> None:
    """Delete it."""
    path.unlink()


def tear(path: Path, share: float) -> None:
    """End an event file with the first part of one more record, as a crash in the midst of a write does.

    A record is its length (8 bytes), a checksum (4), the event, and another checksum (4).
    """
    content = path.read_bytes()
    at, record = 0, b""
    while at + 12 <= len(content):
        size = 16 + struct.unpack_from("<Q", content, at)[0]
        if at + size > len(content):
            return  # it is torn already
        record = content[at : at + size]
        at += size
    with path.open("ab") as file:
        file.write(record[: 1 + int(share * (len(record) - 1))])


DAMAGE = {"flip_byte": flip_byte, "cut_short": cut_short, "delete": delete}


def damage(kind: str, directory: Path, share: float) -> tuple[str, int] | None:
    """Damage the file that a fault is about.

    Returns:
        Its name, and the step of the checkpoint before it (-1: it is none); ``None`` where there is nothing to damage,
        or nothing would be left to go on with.
    """
    if kind == "tear_events":
        events = max((directory / "tensorboard").glob("events.*"), default=None)
        if events is None:
            return None
        tear(events, share)
        return events.name, -1
    *_, before, newest = [None, None, *checkpoints(directory)]
    if before is None or newest is None:
        return None
    DAMAGE[kind](newest, share)
    return newest.name, int(before.stem.removeprefix("step_"))


def points(directory: Path) -> Points:
    """Return what TensorBoard shows of a run: the values it has for each tag and step."""
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator
    from tensorboard.util.tb_logging import get_logger

    get_logger().setLevel("ERROR")  # that points of an earlier start are purged is as it should be
    events = EventAccumulator(str(directory / "tensorboard"), size_guidance={SCALARS: 0}).Reload()
    found: Points = {}
    for tag in events.Tags()[SCALARS]:
        for event in events.Scalars(tag):
            found.setdefault((tag, event.step), []).append(event.value)
    return found


@contextmanager
def small_disk(folder: Path, wanted: bool) -> Iterator[None]:
    """Put a disk of 64 MB there, where the script fills it; that takes root."""
    if not wanted or os.geteuid() != 0:
        yield
        return
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", str(folder)], check=True)
    try:
        yield
    finally:
        kept = shutil.copytree(folder, folder.with_suffix(".kept"))
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
        folder.rmdir()
        kept.rename(folder)


def fill(folder: Path) -> None:
    """Write until nothing more fits."""
    with (folder / "filler").open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    file.write(b"\0" * size)
            except OSError:
                continue
