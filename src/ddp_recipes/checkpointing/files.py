"""Which checkpoint files there are, and the index of one in parts."""

import json
import os
import re
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddp_recipes.errors import RequestError
from ddp_recipes.runtime.files import open_file
from ddp_recipes.runtime.tensors import plain

FORMAT = 2  # 1 had a digest in its content, which no longer counts
LAST, BEST = "last", "best"  # other names of the newest and the best
WHOLE, INDEX = ".pt", ".json"  # the suffix of a file that holds all of a checkpoint, and of the index of one in parts
_STEP_FILE = re.compile(rf"step_(\d{{8,}})(?:{re.escape(WHOLE)}|{re.escape(INDEX)})")

State = dict[str, Any]
FOLDER = re.compile(r"step_\d{8,}-[0-9a-f]{8}")  # of parts; each start of a run has other last digits


def content_of(state: State) -> State:
    """Return what a file holds of a state: as plain data, for nothing else would be read.

    Raises:
        TypeError: names what is neither tensor nor plain data.
    """
    return {"format": FORMAT, **plain(state)}


class DamagedParts(ValueError):
    """What is wrong with an index or with a part."""


def find(ckpt_path: str | None, run_directory: Path, key: str = "ckpt_path") -> list[Path]:
    """Return the files that ``ckpt_path`` stands for, the one to read first; none where a run starts afresh.

    Args:
        ckpt_path: ``last``, ``best``, ``auto`` (last if there is one), a file, or a run directory.
        key: of the config, that gives it.

    Raises:
        RequestError: there is no such checkpoint.
    """
    folder = run_directory / "checkpoints"
    if ckpt_path is None:
        return []
    if ckpt_path in ("last", "auto"):
        found = newest_first(folder)
        if not found and ckpt_path == "last":
            raise RequestError(f"ckpt_path=last: {run_directory} has no checkpoint. {hint(folder)}")
        return found
    path = named(folder, BEST) if ckpt_path == "best" else Path(ckpt_path).expanduser().absolute()
    if os.path.isdir(path):  # also where the name is too long to be looked at
        return _in_directory(f"{key}={ckpt_path}", ckpt_path, path)
    if not os.path.isfile(path):
        raise RequestError(
            f"ckpt_path={ckpt_path}: there is no {path}. Allowed: last, best, auto, a checkpoint file, or a "
            "run directory."
        )
    return [path]


def _in_directory(given: str, ckpt_path: str, path: Path) -> list[Path]:
    """Return the checkpoints of a run directory, or of its ``checkpoints``."""
    if found := newest_first(path / "checkpoints") or newest_first(path):
        return found
    if jobs := sorted(inside.name for inside in path.iterdir() if step_files(inside / "checkpoints")):
        raise RequestError(
            f"{given} holds several runs, a sweep's. Give the directory of one of them: "
            f"{', '.join(f'{ckpt_path}/{name}' for name in jobs[:8])}{' …' if len(jobs) > 8 else ''}."
        )
    raise RequestError(
        f"{given} is a folder without a checkpoint. Give a run directory (one that has "
        f"checkpoints/step_*.pt or step_*.json) or a checkpoint file."
    )


def newest_first(directory: Path) -> list[Path]:
    """Return the checkpoints of a folder from the highest step down.

    ``last`` comes at the end if it is not just another name of one of them: its step is not known without reading.
    """
    found = [path for _, path in sorted(step_files(directory).items(), reverse=True)]
    last = named(directory, LAST)
    there = [path for path in found if path.exists()]  # a symbolic link may lead nowhere
    return [*found, last] if last.exists() and not any(map(last.samefile, there)) else found


def refuse_folders(directory: Path) -> None:
    """Refuse a folder in the place of a name that each save points at its file: the first save would fail.

    Raises:
        RequestError: names it.
    """
    for path in (directory / f"{name}{suffix}" for name in (LAST, BEST) for suffix in (WHOLE, INDEX)):
        if path.is_dir() and not path.is_symlink():
            raise RequestError(f"{path} is a folder, in whose place checkpoints are named. Move it away.")


def step_files(directory: Path) -> dict[int, Path]:
    """Return the complete checkpoints of a folder, which may not exist, by their steps: whole files and indices.

    Of a step that has both, saved by strategies of both kinds, the one that was written later.
    """
    names = os.listdir(directory) if directory.is_dir() else []
    found: dict[int, Path] = {}
    for match in filter(None, map(_STEP_FILE.fullmatch, names)):
        step, path = int(match[1]), directory / match[0]
        found[step] = _later(found.get(step, path), path)
    return found


def named(directory: Path, name: str) -> Path:
    """Return the file that is called ``last`` or ``best`` in a folder, whether or not it is there."""
    return _later(directory / f"{name}{WHOLE}", directory / f"{name}{INDEX}")


def twin(path: Path) -> Path:
    """Return the path of what has the same name as a checkpoint and is of the other kind."""
    return path.with_suffix(INDEX if path.suffix == WHOLE else WHOLE)


def _later(path: Path, other: Path) -> Path:
    """Return which of two files was written later: the first where that cannot be said."""
    with suppress(OSError):  # not there, or deleted meanwhile
        written = other.stat().st_mtime_ns
        with suppress(OSError):
            return path if path.stat().st_mtime_ns >= written else other
        return other
    return path


def is_index(path: Path) -> bool:
    """Whether a file is an index: a zip file begins otherwise."""
    with open_file(path) as file:
        return file.read(1) == b"{"


def folder_of(path: Path) -> Path | None:
    """Return the folder with the parts of a checkpoint; ``None`` where it is a file of its own, or damaged."""
    try:
        return path.parent / str(read_index(path)["folder"]) if is_index(path) else None
    except DamagedParts:
        return None


def abandoned(directory: Path) -> list[Path]:
    """Return the folders in which a save that was killed left parts, or a deletion: no index names them."""
    found = [path for path in directory.iterdir() if FOLDER.fullmatch(path.name)]
    files = (path for pattern in ("*.pt*", "*.json*") for path in directory.glob(pattern) if found and path.is_file())
    indices = [path for path in files if is_index(path)]
    folders = [folder_of(path) for path in indices]
    return [] if None in folders else [path for path in found if path not in folders]  # a damaged one may name any


def read_index(path: Path) -> dict[str, Any]:
    """Return what an index says, its own checksum with it.

    Raises:
        DamagedParts: it is damaged.
    """
    with open_file(path) as whole:
        text = whole.readall()
    try:
        file = json.loads(text)
        content: dict[str, Any] = file["content"]
        right = file["checksum"] == checksum_of(text.partition(b'"content": ')[2][:-1])
        if right and FOLDER.fullmatch(content["folder"]) is None:
            raise DamagedParts("it names no folder of a checkpoint")
    except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise DamagedParts(f"it is no whole index of a checkpoint in parts ({type(error).__name__})") from None
    if not right:
        raise DamagedParts("its content does not match its checksum")
    return {**content, "checksum": file["checksum"]}


def checksum_of(text: bytes) -> str:
    """Return the CRC-32 of an index's content, as the index has it."""
    return f"{zlib.crc32(text):08x}"


def hint(directory: Path) -> str:
    """Return in words which checkpoints a folder has."""
    found = sorted(path.name for path in step_files(directory).values())
    if found:
        return f"In {directory} there are: {', '.join(found)}."
    return (
        f"No complete checkpoint is in {directory}. last and best are of this run's own directory: give the other "
        f"run's hydra.run.dir, to go on in it, or ckpt_path=<its directory>."
    )
