"""When checkpoints are written and which ones are kept. The loop saves; this writes, links and prunes."""

import logging
import math
import os
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from ddp_recipes.checkpointing.files import (
    BEST,
    LAST,
    State,
    content_of,
    size_of,
    step_files,
    step_of,
    unwritable,
    write,
)
from ddp_recipes.checkpointing.staging import Staging
from ddp_recipes.config.settings import CheckpointSettings

YIELDING = 10  # niceness; gets a tenth of a processor that is wanted by others all the time
PATIENCE_S = 1.0  # how long a copy waits for the step after it to be over

log = logging.getLogger(__name__)


class Checkpointer:
    """Does nothing: what every rank but 0 has, and rank 0 where checkpoints are off.

    The loop asks *when* on every rank alike (gathering a state may be a collective); only *writing* differs.
    """

    last: Path | None = None
    best: Path | None = None

    def save(self, state: State, step: int, value: float | None) -> None:
        """Begin to write a checkpoint; ``value`` is the monitored metric if it was measured at this step."""

    def busy(self, seconds: float | None) -> bool:
        """Wait so long for a save that is under way (``None``: to its end); return whether it still is.

        The loop asks at the end of each step.

        Raises:
            RecipeError: the save failed.
        """
        return False

    def state(self) -> State:
        """Return what to go on with after a resume."""
        return {}

    def load_state(self, state: Mapping[str, Any], step: int) -> None:
        """Take back what :meth:`state` returned when ``step`` was saved."""


class FileCheckpointer(Checkpointer):
    """Writes ``step_<8 digits>.pt``, keeps the best k and the newest two, points ``last.pt`` and ``best.pt`` at them.

    The two names are hard links, so they cannot dangle and cost no space. Of the newest two the one before is there in
    case the newest is damaged.

    With ``async_save`` the state is copied, and written on a thread from the end of the next step on: no step is slowed
    by both. The memory for the copy is kept from save to save.

    Args:
        background: whether a save only begins in :meth:`save` without that, too: the state must not change then.
    """

    def __init__(self, directory: Path, settings: CheckpointSettings, background: bool = False) -> None:
        self.directory = directory
        self.settings = settings
        self.values: dict[int, float] = {}  # step -> monitored value, of the files that are kept for it
        self._staging = Staging()
        self._writer = ThreadPoolExecutor(1, "checkpoint", _give_way if settings.async_save else None)
        self._background = background or settings.async_save
        self._asked = threading.Event()  # whether :meth:`busy` was called since the state was copied
        self._pending: Future[None] | None = None

    def save(self, state: State, step: int, value: float | None) -> None:
        """Write a checkpoint, or begin to. At most one save is under way: this waits for the one before.

        Raises:
            RecipeError: this save, or the one before, failed: the disk is full or the folder cannot be written; names
                the path and the bytes needed.
        """
        self.busy(None)
        if value is not None and not math.isnan(value):
            self.values[step] = value
        kept = self._best_steps({step, *self._steps()})
        self.values = {kept_step: self.values[kept_step] for kept_step in kept}
        content = content_of({**state, "checkpointer": self.state()})
        if self.settings.async_save:
            self._staging.hold(content)
            self._asked.clear()
            put = self._release
        else:
            put = partial(self._staging.save, content)
        work = partial(self._write, put, size_of(content), step, kept)
        if self._background:
            self._pending = self._writer.submit(work)
        else:
            work()

    def busy(self, seconds: float | None) -> bool:
        """Wait so long for a save that is under way (``None``: to its end); return whether it still is.

        Raises:
            RecipeError: the save failed.
        """
        if self._pending is None:
            return False
        self._asked.set()
        if wait_for([self._pending], seconds).not_done:
            return True
        done, self._pending = self._pending, None
        done.result()
        return False

    def _release(self, file: BinaryIO) -> None:
        """Write the copy, once the loop has asked for it or a second has passed."""
        self._asked.wait(PATIENCE_S)
        self._staging.release(file)

    def _write(self, put: Callable[[BinaryIO], None], size: int, step: int, kept: list[int]) -> None:
        """Write and link, then prune: at any instant the newest complete checkpoint is on disk."""
        write(self._path(step), put, size, partial(self._link, step, kept))
        try:
            self._prune(step, kept)  # should the power fail, some of them are back
        except OSError as error:
            raise unwritable(self._path(step), size, error) from error

    def _link(self, step: int, kept: list[int]) -> None:
        if self.settings.save_last:
            self.last = self._point(LAST, step)
        if kept:
            self.best = self._point(BEST, kept[0])

    def _point(self, name: str, step: int) -> Path:
        link, path = self.directory / name, self._path(step)
        if not (link.exists() and link.samefile(path)):
            aside = self.directory / f".{name}.part"
            aside.unlink(missing_ok=True)
            os.link(path, aside)
            aside.replace(link)
        return link

    def _prune(self, step: int, kept: list[int]) -> None:
        """Delete what is not to be kept, and what a save that was killed left half written."""
        for name in os.listdir(self.directory):
            if name.startswith(".") and name.endswith(".part"):
                (self.directory / name).unlink()
        if self.settings.save_top_k < 0:
            return
        there = sorted(found for found in self._steps() if found <= step)
        newest = there[-2:] if self.settings.save_last or not kept else []
        for found in there:
            if found not in (*kept, *newest):
                self._path(found).unlink()

    def state(self) -> State:
        """Return the monitored values of the kept files."""
        return {"values": {str(step): value for step, value in self.values.items()}}

    def load_state(self, state: Mapping[str, Any], step: int) -> None:
        """Remember the best ones of an earlier start, as far as their files are still there.

        Files of later steps, damaged or of a future that will now be another one, are renamed to ``<name>.aside``.
        """
        for later in sorted(found for found in self._steps() if found > step):
            path = self._path(later)
            path.rename(f"{path}.aside")
            log.warning("%s is of a later step than %d, and now called %s.aside.", path, step, path.name)
        there = self._steps()
        self.values = {int(saved): value for saved, value in state["values"].items() if int(saved) in there}
        if step in there:
            self._link(step, self._best_steps(there))

    def _best_steps(self, there: set[int]) -> list[int]:
        """Return the steps of the best k of the files that are there, best first; the earlier of two equals."""
        sign = 1 if self.settings.mode == "min" else -1
        ranked = sorted(self.values.keys() & there, key=lambda step: (sign * self.values[step], step))
        return ranked if self.settings.save_top_k < 0 else ranked[: self.settings.save_top_k]

    def _steps(self) -> set[int]:
        return {step_of(path) for path in step_files(self.directory)}

    def _path(self, step: int) -> Path:
        return self.directory / f"step_{step:08d}.pt"


def _give_way() -> None:
    """Have this thread leave the processor to training, which all of its threads wait for when one does."""
    if sys.platform == "linux":  # elsewhere it would be the whole process
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), YIELDING)
