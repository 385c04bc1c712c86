"""When a run stops, validates and saves."""

from ddp_recipes.training.state import Cursor, Run


def reason_to_stop(run: Run) -> str | None:
    """Return why the run is over before its next step, or ``None``."""
    at, limits = run.cursor, run.trainer
    if limits.max_epochs is not None and at.epoch >= limits.max_epochs:
        return "finished"
    if limits.max_steps is not None and at.step >= limits.max_steps:
        return "finished"
    if any(callback.stop for callback in run.callbacks.values()):
        return "finished"
    return run.stop_controller.reason(at.step)


def validation_due(run: Run, before: Cursor) -> bool:
    """Whether the step just done reached a boundary of ``val_check_interval`` in an epoch that is validated."""
    if not run.val or (before.epoch + 1) % run.trainer.check_val_every_n_epoch:
        return False
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
