"""The loop: forward, backward, clip, step, log, evaluate, save."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from ddp_recipes.data.loader import Batch
from ddp_recipes.runtime.fast_paths import zero_grad
from ddp_recipes.runtime.phases import ALL_REDUCE, phase
from ddp_recipes.runtime.seeding import seed_step, step_key
from ddp_recipes.training.cadence import reason_to_stop, save_due, validation_due
from ddp_recipes.training.clock import Rate
from ddp_recipes.training.evaluation import validate
from ddp_recipes.training.non_finite import Losses
from ddp_recipes.training.saving import save
from ddp_recipes.training.state import Cursor, Run


def fit(run: Run) -> str:
    """Train from ``run.cursor`` until the first limit; ``run`` holds the outcome.

    Returns:
        Why it ended: ``finished``, ``max_time`` or ``signal``.
    """
    every = run.trainer.log_every_n_steps
    rate = Rate(run.cursor.samples_seen)
    run.clock.start()
    while (reason := reason_to_stop(run)) is None:
        epoch = run.cursor.epoch
        batches = run.train.batches(epoch, run.cursor.batch, run.trainer.accumulate_grad_batches)
        while run.cursor.epoch == epoch and (reason := reason_to_stop(run)) is None:
            before = run.cursor
            logged = (before.step + 1) % every == 0
            losses, samples = forward_backward(run, batches)
            with phase("optimizer"):
                norm = clip(run, measured=logged)
                lr = run.optimizer.param_groups[0]["lr"]
                run.precision.step(run.optimizer)
                zero_grad(run.optimizer)
                run.cursor = advance(run, samples)
            run.guard.record(run.cursor.step, losses)
            run.clock.step()
            with phase("logging"):
                run.progress.advance(run.cursor.step, run.cursor.epoch)
                if logged:
                    write_log(run, losses, samples, norm, lr, rate)
            for callback in run.callbacks:
                callback.on_step(run.cursor.step)
            run.checkpointer.busy(0)  # an async_save that failed ends the run here
            measured = validation_due(run, before)
            if measured:
                validate(run)
            if save_due(run, before, measured):
                save(run, measured)
            if measured or run.saved_step == run.cursor.step:
                run.clock.start()  # neither belongs to the next step
        if reason is not None:
            break
    if run.saved_step != run.cursor.step and run.cursor.step > 0:
        save(run, measured=False)
    run.checkpointer.busy(None)
    return reason


def forward_backward(run: Run, batches: Iterator[Batch]) -> tuple[list[Losses], int]:
    """Run the micro-batches of one optimizer step, so that gradients are those of the mean over all its samples.

    Returns:
        The losses of each of this rank's shards; the number of samples of all ranks.
    """
    at, plan, strategy = run.cursor, run.train.plan, run.strategy
    numbers = range(at.batch, min(at.batch + run.trainer.accumulate_grad_batches, plan.num_batches))
    samples = sum(map(plan.size, numbers))
    losses: list[Losses] = []
    for shard in run.train.shards:
        seed_step(step_key(run.seed, at.step, shard), run.devices)
        mine: Losses = []
        with strategy.batch_shard(sum(plan.size(number, shard) for number in numbers) / samples):
            for number in numbers:
                with phase("data"):
                    batch = next(batches)
                if batch.num_samples == 0 and not strategy.takes_empty:
                    continue
                weight, last = batch.num_samples * strategy.divisor / samples, number == numbers[-1]
                loss = strategy.training_step(run.module, batch.data, weight, last, run.precision)
                mine.append((loss, batch.num_samples))
        losses.append(mine)
    with phase(ALL_REDUCE):
        strategy.reduce()
    return losses, samples


def clip(run: Run, measured: bool) -> Tensor | None:
    """Clip gradients as configured; return their norm before that if it was needed or ``measured`` is set."""
    limit, by_value = run.trainer.gradient_clip_val, run.trainer.gradient_clip_algorithm == "value"
    if limit is None and not measured:
        return None
    run.precision.unscale(run.optimizer)
    parameters = [parameter for group in run.optimizer.param_groups for parameter in group["params"]]
    norm = None
    if measured or not by_value:
        norm = run.strategy.norm([p.grad for p in parameters if p.grad is not None])
    if limit is not None and norm is not None and not by_value:
        nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    elif limit is not None and any(parameter.grad is not None for parameter in parameters):  # else torch fails
        nn.utils.clip_grad_value_(parameters, limit)
    return norm


def advance(run: Run, samples: int) -> Cursor:
    """Return the cursor after a step, in the next epoch if this one is over; tick the scheduler."""
    at, batches = run.cursor, len(run.train)
    batch = min(at.batch + run.trainer.accumulate_grad_batches, batches)
    run.schedule.tick("step")
    if batch < batches:
        return Cursor(at.epoch, batch, at.step + 1, at.samples_seen + samples)
    run.schedule.tick("epoch")
    return Cursor(at.epoch + 1, 0, at.step + 1, at.samples_seen + samples)


def write_log(run: Run, losses: Sequence[Losses], samples: int, norm: Tensor | None, lr: float, rate: Rate) -> None:
    """Log a step: the one place where a step waits for the device, and for the other ranks' losses."""
    zero = torch.zeros((), dtype=torch.float64, device=run.devices[-1])
    of_shards = [sum((loss.double() * num_samples for loss, num_samples in shard), zero) / samples for shard in losses]
    read = [run.strategy.sum(torch.stack(of_shards))]
    if norm is not None:
        read.append(norm.to(read[0]))
    loss, *norms = torch.stack(read).tolist()  # the wait
    values = {
        "train/loss": loss,
        "train/lr": lr,
        "train/samples_per_second": rate.per_second(run.cursor.samples_seen),
        "train/epoch": run.cursor.epoch + run.cursor.batch / len(run.train),
    }
    if norms:
        values["train/grad_norm"] = norms[0]
    run.metrics.update(values)
    run.logger.scalars(values, run.cursor.step)
    run.progress.metrics(values)
    run.guard.check_loss(run.cursor.step, values["train/loss"], run.good_step)
