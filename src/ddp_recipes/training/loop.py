"""The loop: forward, backward, clip, step, log, evaluate, save."""

import torch
from torch import Tensor

from ddp_recipes.devices import for_sums, peak_memory
from ddp_recipes.runtime.phases import phase
from ddp_recipes.runtime.seeding import key, seed_step
from ddp_recipes.training.cadence import Cursor, reason_to_stop, save_due, validation_due
from ddp_recipes.training.clock import Rate
from ddp_recipes.training.metrics import mean_loss, validate
from ddp_recipes.training.state import Run, Update, await_writer, save


def fit(run: Run) -> str:  # noqa: C901 - the loop reads top to bottom, on one page
    """Train from ``run.cursor`` until the first limit; ``run`` holds the outcome.

    Returns:
        Why it ended: ``finished``, ``max_time``, ``signal`` or ``moved``, where ranks start again with other nodes.
    """
    every = run.trainer.log_every_n_steps
    rate = Rate(run.cursor.samples_seen)
    if run.unfinished is not None:  # by a signal in the validation after the checkpoint's step
        run.saved_step = -1
        for callback in run.callbacks.values():
            callback.on_epoch_start(run.unfinished.epoch)
        end_step(run, run.unfinished)
    elif run.unsaved:
        save_step(run)
    run.clock.start()
    while (reason := reason_to_stop(run)) is None:
        epoch = run.cursor.epoch
        seed_step(key(run.seed, epoch, 0, 0, 0), run.devices)  # what callbacks draw
        for callback in run.callbacks.values():
            callback.on_epoch_start(epoch)
        run.generators.settle(run.cursor.step)
        batches = run.train.batches(epoch, run.cursor.batch, run.trainer.accumulate_grad_batches)
        while run.cursor.epoch == epoch and (reason := reason_to_stop(run)) is None:
            before = run.cursor
            for hook in run.hooks:
                hook.on_step_start(run)
            logged = (before.step + 1) % every == 0
            update = run.update(run, batches, logged)
            advance(run, update.samples)
            run.guard.record(run.cursor.step, update.losses)
            run.clock.step()
            for hook in run.hooks:
                hook.on_update(run)
            with phase("logging"):
                run.progress.advance(run.cursor.step, run.cursor.epoch)
                if logged:
                    write_log(run, update, rate)
            for callback in run.callbacks.values():
                callback.on_step(run.cursor.step)
            run.checkpointer.wait(0)  # an async_save that failed ends the run here
            end_step(run, before)
        if reason is not None:
            break
    run.reason = reason
    for hook in run.hooks:
        hook.on_fit_end(run)
    if run.saved_step != run.cursor.step and run.cursor.step > 0:
        save(run, measured=False)
    await_writer(run, {})
    return reason


def end_step(run: Run, before: Cursor) -> None:
    """Validate and save where that is due; a signal in the validation leaves both to the resumed run."""
    measured = validation_due(run, before)
    if measured and not validate(run):
        return
    if measured:
        run.generators.settle(run.cursor.step)
    over = run.cursor.epoch > before.epoch
    follow(run, "step", len(run.train) if over else run.cursor.batch)
    if over:
        for callback in run.callbacks.values():
            callback.on_epoch_end(before.epoch)
        follow(run, "epoch", run.cursor.epoch)
    if measured:
        for hook in run.hooks:
            hook.on_validated(run)
    run.unfinished, run.measured, run.unsaved = None, measured, run.unsaved or save_due(run, before, measured)
    if run.unsaved:
        save_step(run)
    for hook in run.hooks:
        hook.on_step_end(run)
    if measured or run.saved_step == run.cursor.step:
        run.clock.start()  # neither belongs to the next step
        run.stop_controller.steps.begin(run.cursor.step, ahead=False)


def follow(run: Run, interval: str, number: int) -> None:
    """Tick the schedulers of an interval that follow a metric: so many batches of the epoch, or epochs, are done."""
    for schedule in run.schedules:
        if schedule.monitor is not None and schedule.interval == interval:
            schedule.tick(number, number, run.metrics)


def save_step(run: Run) -> None:
    """Save the checkpoint that is due after the last step."""
    save(run, run.measured)
    run.unsaved = False


def advance(run: Run, samples: int) -> None:
    """Count a step, in the next epoch if this one is over; then tick the schedulers, which may look at the count."""
    at, batches = run.cursor, len(run.train)
    batch = min(at.batch + run.trainer.accumulate_grad_batches, batches)
    over = batch == batches
    epoch, rest = (at.epoch + 1, 0) if over else (at.epoch, batch)
    run.cursor, run.unfinished = Cursor(epoch, rest, at.step + 1, at.samples_seen + samples), at
    for schedule in run.schedules:
        schedule.tick(batch, epoch if over else None)


def write_log(run: Run, update: Update, rate: Rate) -> None:
    """Log a step: the one place where a step waits for the device, and for the other ranks' losses."""
    measured: dict[str, Tensor] = {}
    if update.losses:
        mean = mean_loss(run, update.losses, update.samples) if update.loss is None else update.loss
        measured["train/loss"] = mean
    if update.norm is not None:
        measured["train/grad_norm"] = for_sums(update.norm).to(run.devices[-1])
    numbers = torch.stack(list(measured.values())).tolist() if measured else []  # the wait
    values: dict[str, float] = dict(zip(measured, numbers, strict=True))
    loss = values.get("train/loss")
    values |= {
        "train/lr": float(update.lr),
        "train/samples_per_second": rate.per_second(run.cursor.samples_seen),
        "train/epoch": run.cursor.epoch + run.cursor.batch / run.train.plan.planned_batches,
    }
    if run.flops is not None:
        rates = run.flops.per_second(values["train/samples_per_second"])
        values |= {f"train/{name}": value for name, value in rates.items()}
    if (peak := peak_memory(run.devices)) is not None:
        values["train/peak_memory_bytes"] = peak
    run.progress.metrics(values)
    values |= update.metrics
    values = {name: value for name, value in values.items() if name not in run.task.logged}
    run.metrics.update(values)
    run.logger.scalars(values, run.cursor.step)
    if loss is not None:
        run.guard.check_loss(run.cursor.step, loss, run.good_step)
