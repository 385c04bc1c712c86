"""When checkpoints are written and which ones are kept. The loop saves; this writes, links and prunes."""

import logging
import math
import os
import shutil
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait as wait_for
from functools import partial
from pathlib import Path
from typing import Any

from ddp_recipes.checkpointing.files import (
    BEST,
    LAST,
    WHOLE,
    State,
    abandoned,
    content_of,
    folder_of,
    named,
    step_files,
    twin,
)
from ddp_recipes.checkpointing.writing import StagingWriter, size_of, unwritable
from ddp_recipes.config.settings import CheckpointSettings
from ddp_recipes.runtime.files import LACKING, Save, write_aside

NICENESS = 10  # gets a tenth of a processor that is wanted by others all the time
MAX_WAIT_S = 1.0  # how long a snapshot waits for the end of the step after it

log = logging.getLogger(__name__)


class Checkpointer:
    """Does nothing: what every rank but 0 has, and rank 0 where checkpoints are off.

    The loop asks *when* on every rank alike (gathering a state may be a collective); only *writing* differs.
    """

    last: Path | None = None
    best: Path | None = None

    def save(self, state: State, step: int, value: float | None) -> None:
        """Begin to write a checkpoint; ``value`` is the monitored metric if it was measured at this step."""

    def wait(self, timeout: float | None) -> bool:
        """Wait so many seconds for a save that is under way (``None``: to its end); return whether it still is.

        The loop calls it at the end of each step.

        Raises:
            RecipeError: the save failed.
        """
        return False

    def others_are_done(self) -> None:
        """Note that no other rank is busy; called on a rank that is."""

    def others_are_lost(self) -> None:
        """Note that other ranks that write will not end what they have begun."""

    def state(self) -> State:
        """Return what a resume needs."""
        return {}

    def load_state(self, state: Mapping[str, Any], step: int) -> None:
        """Restore what :meth:`state` returned when ``step`` was saved."""


class Background(Checkpointer):
    """Writes on a thread.

    With ``async_save`` a snapshot is written from the end of the next step on: no step is slowed by both.
    """

    def __init__(self, directory: Path, settings: CheckpointSettings) -> None:
        self.directory, self.settings = directory, settings
        self._thread = ThreadPoolExecutor(1, "checkpoint", _lower_priority if settings.async_save else None)
        self._polled = threading.Event()  # whether :meth:`wait` was called since the snapshot
        self._pending: Future[None] | None = None

    def _begin(self, write: Callable[[], None]) -> None:
        """Write on the thread from now on."""
        self._polled.clear()
        self._pending = self._thread.submit(self._after_a_step, write)

    def _after_a_step(self, write: Callable[[], None]) -> None:
        if self.settings.async_save:
            self._polled.wait(MAX_WAIT_S)
        write()

    def wait(self, timeout: float | None) -> bool:
        if self._pending is None:
            return False
        self._polled.set()
        if wait_for([self._pending], timeout).not_done:
            return True
        done, self._pending = self._pending, None
        done.result()
        return False


class FileCheckpointer(Background):
    """Writes ``step_<8 digits>.pt``, keeps the best k and the newest two, points ``last`` and ``best`` at them.

    The two names are hard links, so they cannot dangle and cost no space. Of the newest two the one before is there in
    case the newest is damaged.

    Args:
        background: whether :meth:`save` only begins to write without ``async_save``, too: the state must not change
            then.
    """

    suffix = WHOLE  # of what it writes; it keeps what a strategy of the other kind has saved as well

    def __init__(self, directory: Path, settings: CheckpointSettings, background: bool = False) -> None:
        super().__init__(directory, settings)
        self.values: dict[int, float] = {}  # step -> monitored value, of the files that are kept for it
        self._writer = StagingWriter()
        self._background = background or settings.async_save
        self._swept = False

    def save(self, state: State, step: int, value: float | None) -> None:
        """Write a checkpoint, or begin to. At most one save is under way: this waits for the one before.

        Raises:
            RecipeError: this save, or the one before, failed; names the path and the bytes needed.
        """
        self.wait(None)
        kept = self._kept(step, value)
        content = content_of({**state, "checkpointer": self.state()})
        staged = self._writer.stage(content, snapshot=self.settings.async_save)
        commit = partial(self._commit, staged, size_of(content), step, kept)
        if self._background:
            self._begin(commit)
        else:
            commit()

    def _kept(self, step: int, value: float | None) -> list[int]:
        """Return the steps of the files that are to be kept for their values, best first, with a new one's.

        A new one without a value, which is no best, is kept behind them: a run that is told to stop goes on there.
        """
        if value is not None and not math.isnan(value):
            self.values[step] = value
        kept = self._best_steps({step, *self._files()})
        self.values = {kept_step: self.values[kept_step] for kept_step in kept}
        return [*kept, step] if kept and value is None else kept

    def _commit(self, staged: Save, size: int, step: int, kept: list[int]) -> None:
        """Write and link, then prune: at any instant the newest complete checkpoint is on disk."""
        path = self.directory / f"step_{step:08d}{self.suffix}"
        with unwritable(path, size):
            write_aside(path, staged, partial(self._link, step, kept))
            if (before := twin(path)).is_file():
                self._delete(before)
            self._prune(step, kept)  # should the power fail, some of them are back

    def _link(self, step: int, kept: list[int]) -> None:
        if self.settings.save_last:
            self.last = self._point(LAST, step)
        if kept:
            self.best = self._point(BEST, kept[0])

    def _point(self, name: str, step: int) -> Path:
        path = step_files(self.directory)[step]
        link = self.directory / f"{name}{path.suffix}"
        if not (link.exists() and link.samefile(path)):
            aside = self.directory / f".{name}.part"
            aside.unlink(missing_ok=True)
            try:
                os.link(path, aside)
            except OSError as error:
                if error.errno not in LACKING:
                    raise
                with path.open("rb") as file:  # a file system without hard links: a copy, which takes the space again
                    write_aside(link, partial(shutil.copyfileobj, file))
            else:
                aside.replace(link)
        twin(link).unlink(missing_ok=True)
        return link

    def _prune(self, step: int, kept: list[int]) -> None:
        """Delete what is not to be kept, and what a save that was killed left incomplete."""
        for incomplete in self.directory.glob(".*.part"):
            incomplete.unlink()
        if not self._swept:
            self._swept = True
            for folder in abandoned(self.directory):
                shutil.rmtree(folder)
        if self.settings.save_top_k < 0:
            return
        files = self._files()
        found = sorted(each for each in files if each <= step)
        newest = found[-2:] if self.settings.save_last or not kept else []
        for each in {*found} - {*kept, *newest}:
            self._delete(files[each])

    def _delete(self, path: Path) -> None:
        folder = folder_of(path)
        path.unlink()
        if folder is not None:
            shutil.rmtree(folder)

    def state(self) -> State:
        values = {str(step): value for step, value in self.values.items()}
        return {"values": values, "monitor": self.settings.monitor}

    def load_state(self, state: Mapping[str, Any], step: int) -> None:
        """Restore the monitored values, as far as their files are still there, if they are of the same metric.

        Files of later steps, damaged or of a future that will now be another one, are renamed to ``<name>.aside``.

        Raises:
            RecipeError: ``last`` or ``best`` cannot be pointed at the file of this step.
        """
        found = step_files(self.directory)
        for later in sorted(each for each in found if each > step):
            path = found.pop(later)
            for each in filter(Path.exists, (path, twin(path))):
                each.rename(f"{each}.aside")
                log.warning("%s is of a later step than %d, and now called %s.aside.", each, step, each.name)
        values = values_of(state, self.settings.monitor)
        if values != state["values"]:
            was, now = state["monitor"], self.settings.monitor
            log.warning("checkpoint.monitor was %s, and is %s: the best is looked for among what comes.", was, now)
        self.values = {int(saved): value for saved, value in values.items() if int(saved) in found}
        if step in self._files():
            with unwritable(named(self.directory, LAST), 0):
                self._link(step, self._best_steps({*found}))

    def _best_steps(self, found: set[int]) -> list[int]:
        """Return the steps of the best k of the files, best first; the earlier of two equals."""
        sign = 1 if self.settings.mode == "min" else -1
        ranked = sorted(self.values.keys() & found, key=lambda step: (sign * self.values[step], step))
        return ranked if self.settings.save_top_k < 0 else ranked[: self.settings.save_top_k]

    def _files(self) -> dict[int, Path]:
        """Return the checkpoints by their steps; what only has the name of one, such as a folder, is not ours."""
        return {step: path for step, path in step_files(self.directory).items() if path.is_file()}


def values_of(state: Mapping[str, Any], monitor: str | None) -> Mapping[str, float]:
    """Return by steps the monitored values in what :meth:`Checkpointer.state` returned; none of another metric."""
    values: Mapping[str, float] = state.get("values", {})
    return values if state.get("monitor", monitor) == monitor else {}


def _lower_priority() -> None:
    """Have this thread leave the processor to training, which all of its threads wait for when one does."""
    if sys.platform == "linux":  # elsewhere it would be the whole process
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
