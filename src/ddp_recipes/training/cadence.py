"""Where a run is, and when it stops, validates and saves: on all ranks at one step."""

from __future__ import annotations

import os
import signal
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, NamedTuple

import torch

from ddp_recipes.config.settings import TrainerSettings
from ddp_recipes.data.order import UNKNOWN
from ddp_recipes.runtime.job import ASKS_TO_STOP, STOPPING
from ddp_recipes.runtime.process import handled_by, stops
from ddp_recipes.runtime.world import World

if TYPE_CHECKING:
    from ddp_recipes.training.state import Run

_FIRST_SAVES, _FIRST_STEPS = 10_000, 10_000_000  # that are looked at ahead


class Cursor(NamedTuple):
    """Where a run is. Order and randomness follow from it and the seed, so nothing else needs to be restored."""

    epoch: int = 0
    batch: int = 0  # batches of this epoch that are done
    step: int = 0  # optimizer steps
    samples_seen: int = 0


@dataclass(frozen=True)
class Length:
    """How long a run is, as far as its limits say.

    Attributes:
        batches: of an epoch; none where nothing is trained, ``UNKNOWN`` where that shows at the epoch's end.
        changes: each the epochs from which on a step accumulates another number of batches, in place of the trainer's.
    """

    batches: int
    trainer: TrainerSettings
    changes: Sequence[Mapping[int, int]] = ()

    def steps_in(self, epochs: int) -> int:
        """Return the optimizer steps in the first so many epochs; an epoch's last one may accumulate fewer batches."""
        accumulated = {0: self.trainer.accumulate_grad_batches}
        for change in self.changes:
            accumulated |= change
        firsts = sorted(accumulated)
        return sum(
            max(0, min(end, epochs) - first) * -(-self.batches // accumulated[first])
            for first, end in zip(firsts, [*firsts[1:], epochs], strict=True)
        )

    @property
    def known(self) -> bool:
        """Whether it is known how many batches an epoch has."""
        return self.batches < UNKNOWN

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps to the end of training, or ``None`` if only time limits it or nothing is trained."""
        epochs, limits = self.trainer.max_epochs, [self.trainer.max_steps] if self.batches else []
        if self.batches and self.known and epochs is not None:
            limits.append(self.steps_in(epochs))
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def total_epochs(self) -> int | None:
        """Epochs to there, the last of which may be cut off."""
        steps = self.total_steps if self.known else None
        return None if steps is None else bisect_left(range(steps + 1), steps, key=self.steps_in)


def reason_to_stop(run: Run) -> str | None:
    """Return why the run is over before its next step, or ``None``."""
    at, limits = run.cursor, run.trainer
    if run.unfinished is not None:
        return "signal"
    if limits.max_epochs is not None and at.epoch >= limits.max_epochs:
        return "finished"
    steps = at.step if run.task.steps is None else run.task.steps
    if limits.max_steps is not None and steps >= limits.max_steps:
        return "finished"
    if run.stops:
        return "finished"
    return run.stop_controller.reason(at.step)


def validation_due(run: Run, before: Cursor) -> bool:
    """Whether the step just done reached a boundary of ``val_check_interval`` in an epoch that is validated."""
    if not run.val or (before.epoch + 1) % run.trainer.check_val_every_n_epoch:
        return False
    if any(callback.stop and callback.validates for callback in run.callbacks.values()):
        return True
    interval = run.trainer.val_check_interval
    batches = interval if isinstance(interval, int) else max(1, int(interval * len(run.train)))
    done = len(run.train) if run.cursor.epoch > before.epoch else run.cursor.batch
    return done // batches > before.batch // batches


def save_due(run: Run, before: Cursor, validated: bool) -> bool:
    """Whether a checkpoint is due: at its own cadence, else with each validation, else at each epoch's end."""
    settings = run.checkpoint
    epoch_over = run.cursor.epoch > before.epoch
    if settings.every_n_steps is not None and run.cursor.step % settings.every_n_steps == 0:
        return True
    if settings.every_n_epochs is not None and epoch_over and run.cursor.epoch % settings.every_n_epochs == 0:
        return True
    if settings.every_n_steps is not None or settings.every_n_epochs is not None:
        return False
    return validated if run.val else epoch_over


def save_meets_validation(run: Run, length: Length) -> bool:
    """Whether a checkpoint is due at a step that is validated, as far as the first so many show."""
    settings, accumulated = run.checkpoint, run.trainer.accumulate_grad_batches
    if length.changes or not length.known or (settings.every_n_steps is None and settings.every_n_epochs is None):
        return True
    ahead = replace(run)
    an_epoch, end = length.steps_in(1), length.total_steps or _FIRST_STEPS
    cadences = (settings.every_n_steps, settings.every_n_epochs and settings.every_n_epochs * an_epoch)
    for step in (step for every in cadences if every for step in islice(range(every, end + 1, every), _FIRST_SAVES)):
        epoch, taken = divmod(step - 1, an_epoch)
        before = Cursor(epoch, taken * accumulated, step - 1)
        over = taken + 1 == an_epoch
        ahead.cursor = Cursor(epoch + 1, 0, step) if over else Cursor(epoch, before.batch + accumulated, step)
        if validation_due(ahead, before):
            return True
    return False


_AGREE_EVERY_S = 1.0


class Pace:
    """How many steps, or batches of a validation, there are between two exchanges: about a second's, the same on ranks.

    Attributes:
        due: the step or batch at which ranks exchange next.
    """

    def __init__(self) -> None:
        self.due = 0
        self._interval = 1
        self._former: tuple[int, float] | None = None  # step and time of the last exchange

    def begin(self, step: int, ahead: bool) -> None:
        """Forget what was done since the last exchange; the next one is now, or about a second ahead."""
        self.due = step + self._interval if ahead else step
        self._former = (step, time.monotonic()) if ahead else None

    def interval(self, step: int) -> int:
        """Return the number of steps until the next exchange, by how long they took since the last one."""
        now = time.monotonic()
        former, self._former = self._former, (step, now)
        if former is None or step == former[0]:
            return self._interval
        seconds_a_step = (now - former[1]) / (step - former[0])
        return max(1, min(int(_AGREE_EVERY_S / seconds_a_step), 8 * (step - former[0])))

    def go_on(self, step: int, interval: int) -> None:
        """Take rank 0's interval."""
        self._interval, self.due = interval, step + interval


_SUSPENDING = (signal.SIGTSTP, signal.SIGCONT)  # Ctrl-Z, and what continues all
_AT_ONCE_S = 0.1


class ValidationStopped(Exception):
    """Ends a validation, on every rank before the same batch: a signal stops the run."""


class StopController:
    """Decides on one step at which all ranks stop, without a collective in every step.

    Signals only set a flag. Ranks exchange flags about once a second: each exchange also carries, from rank 0, the
    number of steps until the next one, so that all ranks hold it at the same step. One process looks at every step.
    So do validations, by their batches, and what takes long between steps is followed by an exchange. Ranks that were
    all told to suspend themselves (Ctrl-Z) stop right after one, where none of them waits for another.

    Use it as a context manager: handlers are in place inside (in the main thread only), and put back after.
    """

    def __init__(
        self,
        world: World,
        total: Callable[[torch.Tensor], torch.Tensor],
        device: torch.device,
        max_time: float | None,
        moves: Callable[[], bool] = lambda: False,
    ) -> None:
        self.world = world
        self.total = total
        self.device = device
        self._moves = moves  # whether all are to leave, for others to go on
        self._max_time = max_time
        self.deadline: float | None = None  # set by the first step
        self.cause = ""  # of a stop by a signal: which one it was
        self.steps, self.batches = Pace(), Pace()
        self._signal: signal.Signals | None = None
        self._interrupts = 0
        self._suspends = False
        self._continued = 0.0
        suspending = _SUSPENDING if world.world_size > 1 else ()
        self._handling = handled_by(
            dict.fromkeys(ASKS_TO_STOP, self._handle) | dict.fromkeys(suspending, self._suspend)
        )

    def reason(self, step: int) -> str | None:
        """Return ``"signal"``, ``"max_time"`` or ``"moved"`` if the run stops at this step, the same on every rank."""
        if self.deadline is None and self._max_time is not None:
            self.deadline = time.monotonic() + self._max_time
        return self._exchange(step, self.steps)

    def check_validation(self, batch: int) -> None:
        """Look before a batch of a validation, by its number over all data sets.

        Raises:
            ValidationStopped: a signal stops the run.
        """
        if batch == 0:
            self.batches.begin(0, ahead=True)
        if self._exchange(batch, self.batches) == "signal":
            raise ValidationStopped

    def _exchange(self, step: int, pace: Pace) -> str | None:
        if step < pace.due:
            return None
        signalled = self._signal is not None
        late = self.deadline is not None and time.monotonic() >= self.deadline
        moves = self._moves()
        self.cause = "" if self._signal is None else self._signal.name
        if self.world.world_size > 1:
            flags = torch.tensor(
                [
                    *(self._signal == number for number in STOPPING),
                    self.world.is_main and late,
                    moves,
                    not self._suspends,
                    pace.interval(step) if self.world.is_main else 0,
                ],
                dtype=torch.int64,
                device=self.device,
            )
            *ranks, lates, moved, going, interval = self.total(flags[None]).tolist()
            taken = [number.name for number, count in zip(STOPPING, ranks, strict=True) if count]
            signalled, late, moves = bool(taken), lates > 0, moved > 0
            if taken and not self.cause:
                self.cause = f"{taken[0]} to another rank"
            pace.go_on(step, interval)
            if going == 0 and self._suspends:  # else it was continued meanwhile
                os.kill(os.getpid(), signal.SIGSTOP)
        return "signal" if signalled else "max_time" if late else "moved" if moves else None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._signal = self._signal or signal.Signals(number)
        stops.append(signal.Signals(number).name)
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                raise KeyboardInterrupt

    def _suspend(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGCONT:
            self._continued = now
        # After a long call of torch's, in which both came, Python calls both handlers at once, that of SIGCONT first.
        self._suspends = now > self._continued + _AT_ONCE_S

    def __enter__(self) -> StopController:
        self._handling.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handling.__exit__(kind, error, trace)
