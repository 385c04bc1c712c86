"""Checkpoint files: written aside, synced, renamed, verified at every load. One is complete or it is not there."""

import os
import re
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ddp_recipes._compat.messages import refused_global
from ddp_recipes.errors import RecipeError, RequestError

FORMAT = 2  # 1 had a digest in its content, which no longer counts
LAST = "last.pt"  # another name of the newest
BEST = "best.pt"
_STEP_FILE = re.compile(r"step_(\d{8,})\.pt")

State = dict[str, Any]


def content_of(state: State) -> State:
    """Return what a file holds of a state: itself and the format's number.

    Raises:
        TypeError: something in it is neither a tensor nor plain data, and so could not be read again.
    """
    _refuse_what_is_not_plain(state)
    return {"format": FORMAT, **state}


def write(path: Path, save: Callable[[BinaryIO], object], size: int, link: Callable[[], object]) -> None:
    """Write a checkpoint: to a hidden file, synced, renamed, the folder synced.

    Args:
        save: writes the content to a file.
        size: its bytes, about, for the message.
        link: gives the file further names in its folder, which then become durable together.

    Raises:
        RecipeError: it could not be written; nothing but what was there before is left.
    """
    try:
        write_aside(path, save, link)
    except (OSError, RuntimeError) as error:
        raise unwritable(path, size, error) from error


def unwritable(path: Path, size: int, error: Exception) -> RecipeError:
    """Return the error for a file that could not be written, with what it needs and what there is."""
    return RecipeError(
        f"{path} could not be written: {_reason(error)}. It needs about {size:,} bytes; "
        f"free on that disk: {_free(path.parent):,}. Earlier checkpoints are untouched."
    )


def write_aside(path: Path, save: Callable[[BinaryIO], object], link: Callable[[], object] = lambda: None) -> None:
    """Let ``save`` write a file so that it is complete at ``path`` or not there at all.

    Args:
        link: gives it further names in its folder, which then become durable together.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.part")
    try:
        with aside.open("wb") as file:
            save(file)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    link()
    _sync_directory(path.parent)


def _sync_directory(directory: Path) -> None:
    """Make renames in a folder durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class DamagedCheckpoint(RequestError):
    """A file that is no whole checkpoint; ``reason`` says why without naming it."""

    def __init__(self, message: str, *, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason

    @classmethod
    def of(cls, path: Path, reason: str) -> "DamagedCheckpoint":
        """Return the error for a file, with what else is in its folder."""
        return cls(f"{path} is damaged or no checkpoint: {reason}. {_hint(path.parent)}", reason=reason)


def load(path: Path) -> State:
    """Read a checkpoint: tensors and plain data only, nothing in it is run. Its checksums are checked.

    Returns:
        The state, with ``format`` and ``checksum``, which copies of a file have in common.

    Raises:
        DamagedCheckpoint: it is damaged, or no checkpoint of ours.
        RequestError: it is not there, or of a newer format.
    """
    try:
        checksum = _verified(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise RequestError(f"There is no checkpoint {path}. {_hint(path.parent)}") from None
    except DamagedCheckpoint:
        raise
    except Exception as error:  # a damaged file can fail in any way in the unpickler
        raise DamagedCheckpoint.of(
            path, f"it cannot be read, or holds more than tensors and plain data ({_reason(error)})"
        ) from error
    if not isinstance(state, dict) or type(state.get("format")) is not int:
        raise DamagedCheckpoint.of(path, "it has not the format of ddp_recipes")
    if state["format"] > FORMAT:
        raise RequestError(
            f"{path} has format {state['format']}, this version reads up to {FORMAT}: update ddp_recipes."
        )
    if not isinstance(state.get("model"), dict):
        raise DamagedCheckpoint.of(path, "it has no weights")
    return {**state, "checksum": checksum}


def _verified(path: Path) -> str:
    """Read a zip file against its checksums, which torch does not look at; return one over them all.

    Raises:
        DamagedCheckpoint: some record is not what was written; names it.
        BadZipFile: it is no zip file.
    """
    with zipfile.ZipFile(path) as archive:
        if record := archive.testzip():
            raise DamagedCheckpoint.of(path, f"its content does not match its checksum ({record})")
        return f"{zlib.crc32(repr([(each.filename, each.CRC) for each in archive.infolist()]).encode()):08x}"


def load_first(paths: Sequence[Path]) -> tuple[Path, State, list[str]]:
    """Read the newest checkpoint that is whole.

    Args:
        paths: as :func:`find` returns them.

    Returns:
        Its path, its state, and what is to be said of others.

    Raises:
        DamagedCheckpoint: the only one is damaged.
        RequestError: all are damaged, each is named; or as :func:`load`.
    """
    damaged: dict[Path, DamagedCheckpoint] = {}
    for path in paths:
        try:
            state = load(path)
            break
        except DamagedCheckpoint as error:
            damaged[path] = error
    else:
        if len(paths) == 1:
            raise damaged[paths[0]]
        reasons = "".join(f"\n  {path.name}: {error.reason}" for path, error in damaged.items())
        raise RequestError(f"Every checkpoint in {paths[0].parent} is damaged:{reasons}")
    said = [f"{bad} is damaged: {error.reason}. {path} is used instead." for bad, error in damaged.items()]
    last = paths[-1]
    if last.name == LAST and path != last:
        with suppress(DamagedCheckpoint):
            newer = load(last)
            if newer["cursor"]["step"] > state["cursor"]["step"]:
                return last, newer, [f"The file that {last} was a second name of is gone; that name is used."]
    return path, state, said


def find(ckpt_path: str | None, run_directory: Path) -> list[Path]:
    """Return the files that ``ckpt_path`` stands for, the one to read first; none where a run starts afresh.

    Args:
        ckpt_path: ``last``, ``best``, ``auto`` (last if there is one), a file, or a run directory.

    Raises:
        RequestError: there is no such checkpoint.
    """
    if ckpt_path is None:
        return []
    if ckpt_path in ("last", "auto"):
        found = newest_first(run_directory / "checkpoints")
        if not found and ckpt_path == "last":
            raise RequestError(
                f"ckpt_path=last: {run_directory} has no checkpoint. {_hint(run_directory / 'checkpoints')}"
            )
        return found
    if ckpt_path == "best":
        path = run_directory / "checkpoints" / BEST
    else:
        path = Path(ckpt_path).expanduser().absolute()
        if path.is_dir():
            return _in_directory(ckpt_path, path)
    if not path.is_file():
        raise RequestError(
            f"ckpt_path={ckpt_path}: there is no {path}. Allowed: last, best, auto, a checkpoint file, or a "
            "run directory."
        )
    return [path]


def _in_directory(ckpt_path: str, path: Path) -> list[Path]:
    """Return the checkpoints of a run directory, or of its ``checkpoints``."""
    found = newest_first(path / "checkpoints") or newest_first(path)
    jobs = sorted(inside.name for inside in path.iterdir() if step_files(inside / "checkpoints"))
    if found:
        return found
    if jobs:
        raise RequestError(
            f"ckpt_path={ckpt_path} holds several runs, a sweep's. Give the directory of one of them: "
            f"{', '.join(f'{ckpt_path}/{name}' for name in jobs[:8])}{' …' if len(jobs) > 8 else ''}."
        )
    raise RequestError(
        f"ckpt_path={ckpt_path} is a folder without a checkpoint. Give a run directory (one that has "
        f"checkpoints/step_*.pt) or a checkpoint file."
    )


def newest_first(directory: Path) -> list[Path]:
    """Return the checkpoints of a folder from the highest step down, found by what is there.

    ``last.pt`` comes at the end if it is not just another name of one of them: its step is not known without reading.
    """
    found = sorted(step_files(directory), key=step_of, reverse=True)
    last = directory / LAST
    return [*found, last] if last.exists() and not any(last.samefile(path) for path in found) else found


def step_files(directory: Path) -> list[Path]:
    """Return the complete ``step_*.pt`` files of a folder, which may not exist."""
    if not directory.is_dir():
        return []
    return [path for path in directory.iterdir() if _STEP_FILE.fullmatch(path.name)]


def step_of(path: Path) -> int:
    """Return the step in a checkpoint's name."""
    match = _STEP_FILE.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def check_weights(path: Path, weights: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Refuse the weights of another model.

    Raises:
        RequestError: lists the names and shapes that differ.
    """
    differing = [
        *(f"{name}: not in the checkpoint" for name in expected if name not in weights),
        *(f"{name}: not in the model" for name in weights if name not in expected),
        *(
            f"{name}: {list(weights[name].shape)} in the checkpoint, {list(expected[name].shape)} in the model"
            for name in expected
            if name in weights and weights[name].shape != expected[name].shape
        ),
    ]
    if differing:
        more = f"\n  … and {len(differing) - 8} more" if len(differing) > 8 else ""
        raise RequestError(
            f"{path} is a checkpoint of another model:\n  " + "\n  ".join(differing[:8]) + more + "\n"
            "Compose the model it was saved from (config.yaml in its run directory), or choose another ckpt_path."
        )


def _hint(directory: Path) -> str:
    found = sorted(path.name for path in step_files(directory))
    return f"In {directory} there are: {', '.join(found)}." if found else f"No complete checkpoint is in {directory}."


def size_of(content: Any) -> int:
    """Return the bytes that nested plain data and tensors take, about."""
    if isinstance(content, torch.Tensor):
        return content.nbytes
    if isinstance(content, Mapping):
        return sum(size_of(value) for value in content.values())
    return sum(size_of(value) for value in content) if isinstance(content, (list, tuple)) else 8


def _refuse_what_is_not_plain(content: Any) -> None:
    if isinstance(content, dict):
        for name, value in content.items():
            _refuse_what_is_not_plain(name)
            _refuse_what_is_not_plain(value)
    elif isinstance(content, (list, tuple)):
        for value in content:
            _refuse_what_is_not_plain(value)
    elif not (content is None or isinstance(content, (torch.Tensor, bool, int, float, str))):
        raise TypeError(
            f"{type(content).__name__} cannot be in a checkpoint: use tensors, numbers, text, lists and dicts."
        )


def _free(directory: Path) -> int:
    while not directory.exists():
        directory = directory.parent
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def _reason(error: Exception) -> str:
    """Return the system's word for it (torch calls a failed write an unexpected position), or what was not read."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__context__
    # torch goes on to say how to load it all the same, which is no advice for a file that came from elsewhere.
    refused = refused_global(error)
    return f"it names {refused}" if refused else (str(error) or type(error).__name__).split(". ")[0].splitlines()[0]
