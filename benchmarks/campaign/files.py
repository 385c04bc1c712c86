"""What a run leaves: read as a user would, and damaged as disks, crashes and people do."""

import json
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

from ddp_recipes.checkpointing.files import step_files

Points = dict[tuple[str, int], list[float]]


def write_shards(folder: Path, rows: int = 290) -> None:
    """Write the shards that recipes on streams read: parquet files of uneven sizes, and compressed ones of JSON lines.

    A few rows of the latter cannot be decoded.
    """
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq
    import zstandard

    numbers = np.random.default_rng(0)
    inputs = numbers.standard_normal((rows, 10)).astype(np.float32)
    targets = np.tanh(inputs @ numbers.standard_normal((10, 5)).astype(np.float32))
    for name in ("parquet", "compressed"):
        (folder / name).mkdir(parents=True)
    cuts = [0, 37, 38, 120, 121, 209, rows]
    for number, (first, last) in enumerate(pairwise(cuts)):
        columns = {"inputs": list(inputs[first:last]), "targets": list(targets[first:last])}
        pq.write_table(pa.table(columns), folder / "parquet" / f"part-{number}.parquet", row_group_size=16)
        lines = [
            json.dumps({"inputs": one.tolist(), "targets": two.tolist()}) if (first + at) % 41 else "{ no JSON"
            for at, (one, two) in enumerate(zip(inputs[first:last], targets[first:last], strict=True))
        ]
        content = zstandard.compress("\n".join(lines).encode())
        (folder / "compressed" / f"part-{number}.jsonl.zst").write_bytes(content)


def outcome(directory: Path, since: float = 0) -> str | None:
    """Return the status that ``summary.json`` gives, or ``None`` where none was written after that time."""
    path = directory / "summary.json"
    if not path.exists() or path.stat().st_mtime < since:
        return None
    status: str = json.loads(path.read_text())["status"]
    return status


def checkpoints(directory: Path) -> list[Path]:
    """Return the files by step."""
    return [path for _, path in sorted(step_files(directory / "checkpoints").items())]


def saving(folder: Path) -> bool:
    """Whether a file ``step_*`` is being written at this instant: a checkpoint, or the index of one."""
    return any(folder.glob(".step_*.part"))


def writing_parts(folder: Path) -> bool:
    """Whether a rank is writing its part of a checkpoint."""
    return any(folder.glob("step_*-*/.rank_*.part"))


def noted(folder: Path) -> bool:
    """Whether a rank has said that its part is there, and the index is not."""
    return any(folder.glob("step_*-*/rank_*.json"))


def pruning(folder: Path) -> bool:
    """Whether parts are being deleted whose index is deleted already."""
    steps = {path.stem for path in step_files(folder).values()}
    return any(step < max(steps, default="") and step not in steps for step in map(_step, folder.glob("step_*-*")))


def _step(folder: Path) -> str:
    return folder.name.partition("-")[0]


WHOLE, IN_PARTS = (saving,), (writing_parts, writing_parts, noted, saving, pruning)
"""What there is to see of a save: of a checkpoint that is one file, and of one that ranks write together."""


def files_of(checkpoint: Path) -> list[Path]:
    """Return a checkpoint's file, and its parts."""
    return [checkpoint, *sorted(checkpoint.parent.glob(f"{checkpoint.stem}-*/*.safetensors"))]


def pickled(directory: Path) -> list[str]:
    """Return the files of checkpoints in parts that hold pickles, or that JSON or safetensors alone cannot read.

    What was damaged and laid aside may be anything else.
    """
    from safetensors.torch import load_file

    folder, found = directory / "checkpoints", []
    folders = []
    for path in (each for each in folder.rglob("*") if each.is_file() and each.suffix != ".safetensors"):
        content = path.read_bytes()
        if content.startswith((b"\x80", b"PK")):  # a pickle's first opcode, the first letters of a zip file
            found.append(path.name)
        elif path in checkpoints(directory):
            folders.append(folder / json.loads(content)["content"]["folder"])
    for path in (each for folder in folders for each in folder.glob("*.safetensors")):
        try:
            load_file(path)
        except Exception:  # noqa: BLE001 - whatever torch raises of a file, it is damaged
            found.append(path.name)
    return found


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
    harmed = files_of(newest)
    number, share = divmod(share * len(harmed), 1)
    path = harmed[int(number)]
    DAMAGE[kind](path, share)
    return str(path.relative_to(newest.parent)), int(before.stem.removeprefix("step_"))


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
