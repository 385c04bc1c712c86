"""When a run stops, validates and saves."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from ddp_recipes.config.settings import TrainerSettings
from ddp_recipes.data.order import UNKNOWN
from ddp_recipes.training.state import Cursor, Run

_FIRST_SAVES, _FIRST_STEPS = 10_000, 10_000_000  # that are looked at ahead


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
    if any(callback.stop for callback in run.callbacks.values()):
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
