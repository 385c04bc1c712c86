"""Checkpoints: written aside, synced, renamed, verified at every load. A checkpoint is complete or it is not there."""

import math
import os
import re
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ddp_recipes.digest import digest
from ddp_recipes.errors import RecipeError, RequestError
from ddp_recipes.settings import CheckpointSettings

FORMAT = 1
_STEP_FILE = re.compile(r"step_(\d{8,})\.pt")

State = dict[str, Any]


class Checkpointer:
    """Does nothing: what every rank but 0 has, and rank 0 where checkpoints are off.

    The loop asks *when* on every rank alike (gathering a state may be a collective); only *writing* differs.
    """

    last: Path | None = None
    best: Path | None = None

    def save(self, state: State, step: int, value: float | None) -> None:
        """Write a checkpoint; ``value`` is the monitored metric if it was measured at this step."""

    def wait(self) -> None:
        """Wait for a save that is under way; a failed one raises."""

    def state(self) -> State:
        """Return what to go on with after a resume."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take back what :meth:`state` returned."""


class FileCheckpointer(Checkpointer):
    """Writes ``step_<8 digits>.pt``, keeps the best k and the newest, and points ``last.pt`` and ``best.pt`` at them.

    The two names are hard links, so they cannot dangle and cost no space.
    """

    def __init__(self, directory: Path, settings: CheckpointSettings) -> None:
        self.directory = directory
        self.settings = settings
        self.values: dict[int, float] = {}  # step -> monitored value, of the files that are kept for it
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def save(self, state: State, step: int, value: float | None) -> None:
        """Write a checkpoint; with ``async_save`` a copy of the state is written while training goes on.

        At most one save is under way: this waits for the one before.

        Raises:
            RecipeError: this save, or the one before, failed: the disk is full or the folder cannot be written; names
                the path and the bytes needed.
        """
        self.wait()
        if value is not None and not math.isnan(value):
            self.values[step] = value
        kept = self._best_steps()
        self.values = {kept_step: self.values[kept_step] for kept_step in kept}
        content = {**state, "checkpointer": self.state()}
        if self.settings.async_save:
            self._pending = self._writer.submit(self._write, _copied(content), step, kept)
        else:
            self._write(content, step, kept)

    def wait(self) -> None:
        """Wait for a save that is under way.

        Raises:
            RecipeError: it failed.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _write(self, content: State, step: int, kept: list[int]) -> None:
        """Write, then link, then prune: at any instant the newest complete checkpoint is on disk."""
        path = self.directory / f"step_{step:08d}.pt"
        write(path, content)
        if self.settings.save_last:
            self.last = self._link(path, "last.pt")
        if kept:
            self.best = self._link(self.directory / f"step_{kept[0]:08d}.pt", "best.pt")
        newest = step if self.settings.save_last or not kept else kept[0]
        for found in step_files(self.directory):
            found_step = step_of(found)
            if self.settings.save_top_k >= 0 and found_step not in (*kept, newest) and found_step <= step:
                found.unlink()

    def state(self) -> State:
        """Return the monitored values of the kept files."""
        return {"values": {str(step): value for step, value in self.values.items()}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Remember the best ones of an earlier start, as far as their files are still there."""
        there = {step_of(path) for path in step_files(self.directory)}
        self.values = {int(step): value for step, value in state["values"].items() if int(step) in there}
        if (self.directory / "best.pt").exists():
            self.best = self.directory / "best.pt"

    def _best_steps(self) -> list[int]:
        """Return the steps of the best k values, best first; the earlier of two equals."""
        sign = 1 if self.settings.mode == "min" else -1
        ranked = sorted(self.values, key=lambda step: (sign * self.values[step], step))
        return ranked if self.settings.save_top_k < 0 else ranked[: self.settings.save_top_k]

    def _link(self, path: Path, name: str) -> Path:
        link = self.directory / name
        if link.exists() and path.exists() and link.samefile(path):
            return link
        aside = self.directory / f".{name}.link"
        aside.unlink(missing_ok=True)
        os.link(path, aside)
        aside.replace(link)
        sync_directory(self.directory)
        return link


def write(path: Path, state: State) -> None:
    """Write a state with its format number and digest: to a hidden file, synced, renamed, the folder synced.

    Raises:
        RecipeError: it could not be written; nothing but what was there before is left.
    """
    content = {"format": FORMAT, **state}

    def save(file: BinaryIO) -> None:
        torch.save({**content, "digest": digest(content)}, file)

    try:
        write_aside(path, save)
    except (OSError, RuntimeError) as error:
        raise RecipeError(
            f"The checkpoint {path} could not be written: {_reason(error)}. It needs about {_bytes(state):,} bytes; "
            f"free on that disk: {_free(path.parent):,}. Earlier checkpoints are untouched."
        ) from error


def write_aside(path: Path, save: Callable[[BinaryIO], None]) -> None:
    """Let ``save`` write a file so that it is complete at ``path`` or not there at all."""
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
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Make renames in a folder durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load(path: Path) -> State:
    """Read a checkpoint: tensors and plain data only, nothing in it is run. Its digest is checked.

    Raises:
        RequestError: it is no checkpoint of ours, of a newer format, or damaged.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise RequestError(f"There is no checkpoint {path}. {_hint(path.parent)}") from None
    except Exception as error:  # a damaged file can fail in any way in the unpickler
        raise RequestError(
            f"{path} cannot be read as a checkpoint ({_reason(error)}): it is damaged, or holds more than "
            f"tensors and plain data. {_hint(path.parent)}"
        ) from error
    if not isinstance(state, dict) or "format" not in state or "digest" not in state:
        raise RequestError(f"{path} is no checkpoint of ddp_recipes: it has no format and digest. {_hint(path.parent)}")
    if state["format"] > FORMAT:
        raise RequestError(
            f"{path} has format {state['format']}, this version reads up to {FORMAT}: update ddp_recipes."
        )
    expected = state.pop("digest")
    if digest(state) != expected:
        raise RequestError(f"{path} is damaged: its content does not match its digest. {_hint(path.parent)}")
    return state


def find(ckpt_path: str | None, run_directory: Path) -> Path | None:
    """Return the file that ``ckpt_path`` names, or ``None`` where a run starts afresh.

    Args:
        ckpt_path: ``last``, ``best``, ``auto`` (last if there is one), a file, or a run directory.

    Raises:
        RequestError: there is no such checkpoint.
    """
    if ckpt_path is None:
        return None
    if ckpt_path in ("last", "auto"):
        found = newest(run_directory / "checkpoints")
        if found is None and ckpt_path == "last":
            raise RequestError(
                f"ckpt_path=last: {run_directory} has no checkpoint. {_hint(run_directory / 'checkpoints')}"
            )
        return found
    if ckpt_path == "best":
        path = run_directory / "checkpoints" / "best.pt"
    else:
        path = Path(ckpt_path).expanduser().absolute()
        if path.is_dir():
            inside = newest(path / "checkpoints") or newest(path)
            if inside is None:
                raise RequestError(
                    f"ckpt_path={ckpt_path} is a folder without a checkpoint. Give a run directory (one that has "
                    f"checkpoints/step_*.pt) or a checkpoint file."
                )
            return inside
    if not path.is_file():
        raise RequestError(
            f"ckpt_path={ckpt_path}: there is no {path}. Allowed: last, best, auto, a checkpoint file, or a "
            "run directory."
        )
    return path


def newest(directory: Path) -> Path | None:
    """Return the checkpoint of the highest step, found by what is there."""
    return max(step_files(directory), key=step_of, default=None)


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


def _copied(content: Any) -> Any:
    """Return nested plain data with every tensor copied to the CPU: training changes the ones it was given."""
    if isinstance(content, torch.Tensor):
        return content.detach().to("cpu", copy=True)
    if isinstance(content, dict):
        return {name: _copied(value) for name, value in content.items()}
    return type(content)(map(_copied, content)) if isinstance(content, (list, tuple)) else content


def _hint(directory: Path) -> str:
    found = sorted(path.name for path in step_files(directory))
    return f"In {directory} there are: {', '.join(found)}." if found else f"No complete checkpoint is in {directory}."


def _bytes(content: Any) -> int:
    if isinstance(content, torch.Tensor):
        return content.nbytes
    if isinstance(content, Mapping):
        return sum(_bytes(value) for value in content.values())
    return sum(_bytes(value) for value in content) if isinstance(content, (list, tuple)) else 8


def _free(directory: Path) -> int:
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def _reason(error: Exception) -> str:
    """Return the system's word for it; torch reports a failed write as an unexpected position."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__context__
    return (str(error) or type(error).__name__).splitlines()[0]
