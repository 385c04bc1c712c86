"""What is in a checkpoint file, which files there are, and how one is read: verified at every load."""

import json
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from ddp_recipes.checkpointing.writing import reason_of
from ddp_recipes.errors import RecipeError, RequestError
from ddp_recipes.runtime.files import open_file
from ddp_recipes.runtime.tensors import Source, plain

FORMAT = 2  # 1 had a digest in its content, which no longer counts
LAST, BEST = "last", "best"  # other names of the newest and the best
WHOLE, INDEX = ".pt", ".json"  # the suffix of a file that holds all of a checkpoint, and of the index of one in parts
_STEP_FILE = re.compile(rf"step_(\d{{8,}})(?:{re.escape(WHOLE)}|{re.escape(INDEX)})")

State = dict[str, Any]
Verify = Callable[[Sequence[Callable[[], str | None]]], Sequence[str | None]]
FOLDER = re.compile(r"step_\d{8,}-[0-9a-f]{8}")  # of parts; each start of a run has other last digits

_KINDS: dict[str, type] = {
    **dict.fromkeys(("checkpointer", "metrics", "optimizer", "precision", "scheduler"), dict),
    **dict.fromkeys(("more_optimizers", "more_schedulers"), list),
    **dict.fromkeys(("global_batch_size", "seed", "world_size"), int),
}


def content_of(state: State) -> State:
    """Return what a file holds of a state: as plain data, for nothing else would be read.

    Raises:
        TypeError: names what is neither tensor nor plain data.
    """
    return {"format": FORMAT, **plain(state)}


class DamagedCheckpoint(RequestError):
    """A file that is no whole checkpoint. The message also says what else is in its folder; ``reason`` only why."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(path, reason)  # from which another process unpickles it
        self.path, self.reason = path, reason

    def __str__(self) -> str:
        return f"{self.path} is damaged or no checkpoint: {self.reason}. {_hint(self.path.parent)}"


class DamagedParts(ValueError):
    """What is wrong with an index or with a part."""


def verify_here(checks: Sequence[Callable[[], str | None]]) -> list[str | None]:
    """Return what checks of parts return, which are all made in this process."""
    return [check() for check in checks]


def load(path: Path, verify: Verify = verify_here, readers: int = 0) -> State:
    """Return the state in a checkpoint, verified: tensors and plain data only, nothing in it is run.

    It has a ``checksum``, too, which copies of a file have in common. What ranks had rows of is a ``Source``.

    Args:
        verify, readers: as :func:`ddp_recipes.checkpointing.parts.load`.

    Raises:
        DamagedCheckpoint: it is damaged, or no checkpoint of ours.
        RequestError: it is not there, or of a newer format.
        RunFailed: a rank that was to verify a part of it does not answer.
    """
    if path.exists() and not path.is_file():  # to open a pipe would wait for ever
        raise DamagedCheckpoint(path, "it is no regular file")
    try:
        if is_index(path):
            from ddp_recipes.checkpointing import parts

            return _checked(path, parts.load(path, verify, readers), parts.FORMAT)
        refuse_odd_zip(path)
        with zipfile.ZipFile(path) as archive:  # torch does not look at its checksums
            if record := archive.testzip():
                raise DamagedCheckpoint(path, f"its content does not match its checksum ({record})")
            checksum = f"{zlib.crc32(repr([(each.filename, each.CRC) for each in archive.infolist()]).encode()):08x}"
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise RequestError(f"There is no checkpoint {path}. {_hint(path.parent)}") from None
    except RecipeError:  # of ranks that were to verify parts, too: the files may be whole
        raise
    except DamagedParts as error:
        raise DamagedCheckpoint(path, str(error)) from None
    except Exception as error:  # a damaged file can fail in any way in the unpickler
        raise DamagedCheckpoint(
            path, f"it cannot be read, or holds more than tensors and plain data ({reason_of(error)})"
        ) from error
    return {**_checked(path, state, FORMAT), "checksum": checksum}


def _checked(path: Path, state: Any, newest: int) -> State:
    """Return what is in a file, if a run of ours wrote it so."""
    if not isinstance(state, dict) or type(state.get("format")) is not int:
        raise DamagedCheckpoint(
            path, "it has not the format of ddp_recipes (weights alone, of any program, are given as weights_from)"
        )
    if state["format"] > newest:
        raise RequestError(
            f"{path} has format {state['format']}, this version reads up to {newest}: update ddp_recipes."
        )
    if (misfit := _misfit(state)) is not None:
        raise DamagedCheckpoint(path, misfit)
    return state


_FOLDER = 0x10  # in the attributes of MS-DOS, https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT 4.4.15


def refuse_odd_zip(path: Path) -> None:
    """Refuse a zip file that unpacks to more than it takes, or has a record that is marked as a folder.

    torch writes none. It reads the first one into memory, and in the place of the other one what is in memory: the
    mark is one bit, which no checksum covers.

    Raises:
        ValueError: it is one.
    """
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
        if sum(record.file_size for record in records) > path.stat().st_size:
            raise ValueError("it unpacks to more than it takes, as no checkpoint does")
        for record in records:
            if record.external_attr & _FOLDER:
                raise ValueError(f"its record {record.filename} is marked as a folder")


def _misfit(state: State) -> str | None:
    """Return what in a file is not as a run writes it, where the run could not say so itself."""
    weights, cursor = state.get("model"), state.get("cursor", {})
    if not isinstance(weights, dict):
        return "it has no weights"
    for name, value in weights.items():
        is_tensor = isinstance(value, (torch.Tensor, Source))
        if not isinstance(name, str) or not (is_tensor or name.endswith("_extra_state")):
            return f"its weight {name} is a {type(value).__name__}, no tensor"
    counts = ("epoch", "batch", "step", "samples_seen")
    if not isinstance(cursor, dict) or any(type(cursor.get(name, 0)) is not int for name in counts):
        return f"its cursor is {cursor}, no whole numbers"
    for name, kind in _KINDS.items():
        if not isinstance(state.get(name, kind()), kind):
            return f"its {name} is a {type(state[name]).__name__}, no {kind.__name__}"
    return None


def load_first(paths: Sequence[Path], verify: Verify = verify_here, readers: int = 0) -> tuple[Path, State, list[str]]:
    """Return the path and state of the first checkpoint that is whole, and warnings about the others.

    Raises:
        DamagedCheckpoint: the only one is damaged.
        RequestError: all are damaged, each is named; or as :func:`load`.
    """
    damaged: dict[Path, DamagedCheckpoint] = {}
    for path in paths:
        try:
            state = load(path, verify, readers)
            break
        except DamagedCheckpoint as error:
            damaged[path] = error
    else:
        if len(paths) == 1:
            raise damaged[paths[0]]
        reasons = "".join(f"\n  {path.name}: {error.reason}" for path, error in damaged.items())
        raise RequestError(f"Every checkpoint in {paths[0].parent} is damaged:{reasons}")
    last = paths[-1]
    if last.stem == LAST and path != last:
        with suppress(DamagedCheckpoint):
            newer = load(last, verify)
            if newer.get("cursor", {}).get("step", 0) > state.get("cursor", {}).get("step", 0):
                return last, newer, [f"The file that {last} was a second name of is deleted; that name is used."]
    return path, state, [f"{bad} is damaged: {error.reason}. {path} is used instead." for bad, error in damaged.items()]


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
            raise RequestError(f"ckpt_path=last: {run_directory} has no checkpoint. {_hint(folder)}")
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


def check_weights(path: Path, weights: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Refuse the weights of another model, and list the names and shapes that differ."""
    differing = [
        *(f"{name}: not in the checkpoint" for name in expected if name not in weights),
        *(f"{name}: not in the model" for name in weights if name not in expected),
        *(
            f"{name}: {_described(weights[name])} in the checkpoint, {_described(expected[name])} in the model"
            for name in expected
            if name in weights and not is_alike(weights[name], expected[name])
        ),
    ]
    if differing:
        more = f"\n  … and {len(differing) - 8} more" if len(differing) > 8 else ""
        raise RequestError(
            f"{path} is a checkpoint of another model:\n  " + "\n  ".join(differing[:8]) + more + "\n"
            "Compose the model it was saved from (config.yaml in its run directory), or choose another ckpt_path."
        )


def _described(value: Any) -> str:
    return f"a {type(value).__name__}" if (shape := _shape(value)) is None else str(list(shape))


def is_alike(value: Any, other: Any) -> bool:
    """Whether two weights have one shape; what modules save beside tensors (``get_extra_state``) has none."""
    return _shape(value) == _shape(other)


def _shape(value: Any) -> Sequence[int] | None:
    return None if is_lazy(value) else getattr(value, "shape", None)  # which a lazy one raises an error for


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


def _hint(directory: Path) -> str:
    found = sorted(path.name for path in step_files(directory).values())
    if found:
        return f"In {directory} there are: {', '.join(found)}."
    return (
        f"No complete checkpoint is in {directory}. last and best are of this run's own directory: give the other "
        f"run's hydra.run.dir, to go on in it, or ckpt_path=<its directory>."
    )
