"""What a rank hands over to one that takes the place of a lost rank: its state in memory, as a checkpoint has it.

Of a sharded model any number of ranks read a rank's part there, as a checkpoint in parts. Points are logged once, also
where a step is done again because a rank was lost. What forward passes write to is kept as it was before a step.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ddp_recipes._compat.torch_ import buffers_of, copy_each
from ddp_recipes.build.resume import restore
from ddp_recipes.checkpointing.files import State
from ddp_recipes.checkpointing.parts import NAMES, PartFile, dealt, restored, stream, taken_apart
from ddp_recipes.errors import RunFailed
from ddp_recipes.loggers.base import Logger, Loggers
from ddp_recipes.recovery.memory import HEADER, SnapshotId, least, write_state
from ddp_recipes.recovery.source import Progress, ahead_s
from ddp_recipes.runtime.job import Regroup
from ddp_recipes.runtime.phases import CALLS
from ddp_recipes.runtime.tensors import sums_of_bits
from ddp_recipes.strategies.collectives import pieces, unpack
from ddp_recipes.tasks.task import outside
from ddp_recipes.tasks.written import seen_of
from ddp_recipes.training.cadence import Pace
from ddp_recipes.training.state import Run, load_part, local_state, saved_state

LOOKS = 3  # steps whose passes are looked at by what they leave in parameters that are not trained


class BeforeStep:
    """Keeps buffers, and those parameters that are not trained and that passes have been seen to write to.

    A moving average of the weights is one (a teacher, a target network). The others are not copied: they may be most of
    a model, as where a few are fine-tuned.
    """

    def __init__(self, module: nn.Module) -> None:
        every = [buffers_of(each) for each in module.modules()]
        self._places = [
            (own, name) for own in every for name, tensor in own.items() if tensor is not None and not tensor.is_meta
        ]
        self._parameters = {
            outside(name): each
            for name, each in module.named_parameters()
            if type(each.data) is Tensor and not each.is_meta
        }
        self._written: dict[str, nn.Parameter] = {}  # by passes, of those
        self._kept = [tensor.clone() for tensor in self._tensors()]
        self._seen: dict[str, tuple[int, int]] = {}  # of each parameter, as a step began; of none between steps
        self._sums: dict[str, int] = {}  # of the bits of those that are not trained, likewise
        self._looks = LOOKS

    def _tensors(self) -> list[Tensor]:
        buffers = [tensor for own, name in self._places if (tensor := own[name]) is not None]
        return [each.detach() for each in (*buffers, *self._written.values())]

    def keep(self) -> None:
        """Keep them as they are now."""
        if self._kept:
            copy_each(self._kept, self._tensors())

    def begin(self) -> None:
        """Keep them as a step begins."""
        self.keep()
        self._seen = {name: seen_of(each) for name, each in self._parameters.items()}
        frozen = [name for name, each in self._parameters.items() if not each.requires_grad]
        self._sums = self._bits(frozen) if self._looks else {}

    def end(self) -> None:
        """Keep them as a step has ended, which counts, with what it was seen to write to."""
        for name in self._changed():
            if not self._parameters[name].requires_grad:  # else the optimizer has
                self._written[name] = self._parameters[name]
                self._kept.append(torch.empty_like(self._parameters[name].detach()))
        self._seen, self._sums, self._looks = {}, {}, max(0, self._looks - 1)
        self.keep()

    def put_back(self) -> None:
        """Put them back as they were kept.

        Raises:
            RunFailed: a pass had written to another parameter, of which there is no copy.
        """
        changed = sorted(self._changed())
        self._seen, self._sums = {}, {}
        if self._kept:
            copy_each(self._tensors(), self._kept)
        if changed:
            raise RunFailed(
                f"A forward pass had written to the parameter {changed[0]} as a rank was lost, and there is no copy of "
                f"what it was before. All ranks start again."
            )

    def _changed(self) -> set[str]:
        """Return which parameters were written to since the step began, but those that are kept."""
        bits = self._bits(self._sums)
        changed = {name for name, before in self._seen.items() if seen_of(self._parameters[name]) != before}
        changed |= {name for name, before in self._sums.items() if bits[name] != before}
        return changed - self._written.keys()

    def _bits(self, names: Collection[str]) -> dict[str, int]:
        return dict(zip(names, sums_of_bits([self._parameters[name].detach() for name in names]), strict=True))


class Points(Loggers):
    """Give points to a logger, each once and at once; every rank keeps those of the latest step for a new rank 0.

    A kill takes with it what waits in memory, so nothing does.

    Args:
        logger: rank 0's; another rank's drops them.
    """

    def __init__(self, logger: Logger) -> None:
        super().__init__([logger])
        self._step = -1
        self._values: dict[str, float] = {}
        self._batches: dict[str, int] = {}  # the last one of an evaluation, by name

    @property
    def latest(self) -> tuple[int, dict[str, float]]:
        """The latest step that had points, and those."""
        return self._step, self._values

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        if step > self._step:
            self._step, self._values = step, {}
        if step < self._step:
            return
        fresh = {name: value for name, value in values.items() if name not in self._values}
        self._values |= fresh
        if fresh:
            super().scalars(fresh, step)
            self.flush()

    def of_batch(self, values: Mapping[str, float], batch: int, step: int) -> None:
        fresh = {name: value for name, value in values.items() if batch > self._batches.get(name, -1)}
        if fresh:
            self._batches |= dict.fromkeys(fresh, batch)
            super().of_batch(fresh, batch, step)
            self.flush()


_LENGTH = 8  # bytes that hold the length of the JSON


def pieces_of(state: State, part: int) -> Iterator[bytes | memoryview]:
    """Yield what a rank keeps of a state: its rows and, of the first part, all that is not dealt."""
    tree, tensors, rows = taken_apart(state)
    note = {
        "state": tree if part == 0 else None,
        "drawn": state["drawn"],
        "rows": {
            name: [NAMES[own.values.dtype], [*own.shape], own.start, own.start + len(own.values)]
            for name, own in rows.items()
        },
    }
    text = json.dumps(note).encode()
    yield len(text).to_bytes(_LENGTH, "little") + text
    held = {name: own.values for name, own in rows.items() if len(own.values)}
    yield from stream({**(tensors if part == 0 else {}), **held})


def load_snapshot(slots: Sequence[str], opened: Callable[[str], io.RawIOBase]) -> State:
    """Return the state whose parts are in these slots: what is sharded is read once it is requested."""
    notes: list[dict[str, Any]] = []
    files: list[PartFile] = []
    for part, place in enumerate(slots):
        with opened(place) as file:
            _, content, *_ = HEADER.unpack(file.read(HEADER.size) or b"")
            size = int.from_bytes(file.read(_LENGTH) or b"", "little")
            notes.append(json.loads(file.read(size) or b""))
        tensors, begin = content - _LENGTH - size, HEADER.size + _LENGTH + size
        files.append(PartFile(Path(place), part, tensors, 0, begin, partial(opened, place)))
    rows = {
        name: {
            "dtype": dtype,
            "shape": shape,
            "at": [[part, *note["rows"][name][2:]] for part, note in enumerate(notes) if name in note["rows"]],
        }
        for name, (dtype, shape, *_) in notes[0]["rows"].items()
    }
    state: State = restored(notes[0]["state"], dealt(rows, files), files)
    return {**state, "drawn": [drawn for note in notes for drawn in note["drawn"]]}


def progress_of(run: Run) -> Progress:
    """Return how far this rank has come."""
    return Progress(run.cursor.step, 0 if run.unfinished is not None else 1 if run.unsaved else 2)


def rewind(run: Run, before: BeforeStep | None) -> None:
    """Leave the run as it was after its last finished step, whatever was under way.

    Raises:
        RunFailed: there is no copy of something that it had changed.
    """
    if before is not None:
        before.put_back()
    for optimizer in run.optimizers:
        CALLS.zero_grad(optimizer)
    run.task.train_sums = None
    run.task.leave_evaluation()
    run.module = run.task  # what the strategy made of it keeps its connections open
    run.stop_controller.steps, run.stop_controller.batches = Pace(), Pace()


def transferred_state(run: Run, losses: int) -> State:
    """Return the state of this rank, and what of a run no checkpoint has: ``losses`` that it has counted, among it."""
    return {**local_state(run), "run": _beyond(run, losses)}


def _beyond(run: Run, losses: int) -> dict[str, Any]:
    ahead = ahead_s()
    return {
        "after": progress_of(run).after,
        "values": dict(run.values),
        "monitor": run.monitor,
        "unsaved": run.unsaved,
        "measured": run.measured,
        "stops": run.stops,
        "saved_step": run.saved_step,
        "good_step": run.good_step,
        "samples_before": run.samples_before,
        "train_seconds": run.clock.train_seconds,
        "began": _on_clock(run.began, ahead),
        "deadline": _on_clock(run.stop_controller.deadline, ahead),
        "points": run.logger.latest if isinstance(run.logger, Points) else (-1, {}),
        "losses": losses,
        "replaced": run.replaced,
        "seconds_lost": run.seconds_lost,
    }


def _on_clock(seconds: float | None, ahead: float) -> float | None:
    """Return a time by a clock that is so many seconds ahead."""
    return None if seconds is None else seconds + ahead


class Memory:
    """Keeps this rank's state in memory that another process holds.

    Of a model that is dealt row by row a rank keeps its part of a checkpoint, which any number of ranks can load.

    Args:
        slots: files, of which one is whole while another is written.
        parts: in which ranks hold the model.
        start: the name of this start of the ranks.
    """

    def __init__(self, slots: Sequence[str], parts: int, start: str) -> None:
        self._slots, self._parts, self._start = slots, parts, start

    def keep(self, run: Run, losses: int) -> None:
        """Keep the state after a finished step, by which the run has counted so many losses of ranks."""
        run.logger.flush()  # or a kill would take points with it that do not come again
        snapshot = SnapshotId(run.cursor.step, run.world.rank % self._parts, self._parts, self._start)
        if run.strategy.settings.kind == "sharded":
            content = pieces_of({**saved_state(run), "run": _beyond(run, losses)}, snapshot.part)
        else:
            content = (piece.numpy().data for piece in pieces(transferred_state(run, losses)))
        with open(least(self._slots, snapshot), "r+b") as file:
            write_state(file, snapshot, content)


def in_memory(place: str, opened: Callable[[str], io.RawIOBase]) -> State:
    """Return the state of a rank that :class:`Memory` kept, all that it has."""
    if place.startswith("/"):
        content = torch.from_file(place, shared=False, size=os.stat(place).st_size, dtype=torch.uint8)[HEADER.size :]
    else:
        with opened(place) as file:
            content = torch.empty(HEADER.unpack(file.read(HEADER.size) or b"")[1], dtype=torch.uint8)
            file.readinto(content.numpy().data)
    state: State = unpack(content)
    return state


def sync_to(run: Run, state: State) -> None:
    """Take another rank's state unless this one has come as far."""
    if progress_of(run) != (state["cursor"]["step"], state["run"]["after"]):
        load_part(run.task, state["model"])
        run.unfinished = None
        restore(run, state)


def resume_from(run: Run, state: State, regroup: Regroup) -> None:
    """Go on from a state that this rank has now."""
    own: dict[str, Any] = state["run"]
    kept = ("values", "monitor", "unsaved", "measured", "saved_step", "good_step", "samples_before")
    for name in (*kept, "replaced", "seconds_lost"):
        setattr(run, name, own[name])
    for name in own["stops"]:  # after this step, as others have decided in it
        run.callbacks[name].stop = True
    run.clock.train_seconds = own["train_seconds"]
    ahead = ahead_s()
    run.stop_controller.deadline, run.began = _on_clock(own["deadline"], -ahead), own["began"] - ahead
    if min(regroup.lost, default=run.world.world_size) < max(
        1, run.strategy.settings.layout(run.world.world_size).writers
    ):
        run.checkpointer.others_are_lost()
        if run.saved_step == run.cursor.step or (run.checkpoint.async_save and run.saved_step > 0):
            run.unsaved = True  # it may have died before that was on disk
    step, values = own["points"]
    if values:
        run.logger.scalars(values, step)
