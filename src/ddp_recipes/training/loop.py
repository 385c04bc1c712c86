"""The loop: forward, backward, clip, step, log, evaluate, save."""

import logging
import time
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ddp_recipes.callbacks import Callback
from ddp_recipes.checkpointing.files import State
from ddp_recipes.checkpointing.manager import Checkpointer
from ddp_recipes.config.settings import CheckpointSettings, TrainerSettings
from ddp_recipes.data.loader import Batch, Loader
from ddp_recipes.errors import RequestError, nearest
from ddp_recipes.loggers import Logger
from ddp_recipes.reporting.progress import Progress
from ddp_recipes.runtime.fast_paths import zero_grad
from ddp_recipes.runtime.seeding import seed_step, step_key
from ddp_recipes.runtime.world import World
from ddp_recipes.strategies import Strategy
from ddp_recipes.strategies.base import Wrapped
from ddp_recipes.tasks import Task
from ddp_recipes.training.non_finite import Losses, Watch, not_finite
from ddp_recipes.training.precision import Precision
from ddp_recipes.training.stopping import Stopper

log = logging.getLogger(__name__)

SIGN_OF_LIFE_S = 0.25  # less than the least launcher.timeout_s

Metrics = dict[str, float]


class Cursor(NamedTuple):
    """Where a run is. Order and randomness follow from it and the seed, so nothing else needs to be restored."""

    epoch: int = 0
    batch: int = 0  # batches of this epoch that are done
    step: int = 0  # optimizer steps
    samples_seen: int = 0


@dataclass
class Schedule:
    """A learning-rate scheduler and what one tick of it is: ``step`` or ``epoch``."""

    scheduler: torch.optim.lr_scheduler.LRScheduler
    interval: str

    def tick(self, interval: str) -> None:
        """Advance if this is the scheduler's interval."""
        if interval == self.interval:
            self.scheduler.step()


@dataclass
class Run:
    """All that the loop works with; ``recipe.py`` makes it from the config."""

    world: World
    task: Task
    module: Wrapped
    strategy: Strategy
    devices: Sequence[torch.device]
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    precision: Precision
    train: Loader
    val: Loader | None
    trainer: TrainerSettings
    checkpoint: CheckpointSettings
    monitor: str
    seed: int
    shards: int | None  # parts of a batch that the strategy fixes
    stopper: Stopper
    watch: Watch
    logger: Logger = field(default_factory=Logger)
    progress: Progress = field(default_factory=Progress)
    checkpointer: Checkpointer = field(default_factory=Checkpointer)
    callbacks: Sequence[Callback] = ()
    cursor: Cursor = Cursor()  # noqa: RUF009 (a tuple)
    metrics: Metrics = field(default_factory=dict)  # the latest of each
    step_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=10_000))
    train_seconds: float = 0.0  # in steps, without validation and saving
    samples_before: int = 0  # seen by earlier starts
    saved_step: int = -1
    good_step: int = -1  # the same, where checkpoints are written


def fit(run: Run) -> str:
    """Train from ``run.cursor`` until the first limit; ``run`` holds the outcome.

    Returns:
        Why it ended: ``finished``, ``max_time`` or ``signal``.
    """
    every = run.trainer.log_every_n_steps
    clock = Clock(run.cursor)
    while (reason := _reason_to_stop(run)) is None:
        epoch = run.cursor.epoch
        batches = run.train.batches(epoch, run.cursor.batch, run.trainer.accumulate_grad_batches)
        while run.cursor.epoch == epoch and (reason := _reason_to_stop(run)) is None:
            before = run.cursor
            logged = (before.step + 1) % every == 0
            losses, samples = forward_backward(run, batches)
            norm = clip(run, measured=logged)
            lr = run.optimizer.param_groups[0]["lr"]
            run.precision.step(run.optimizer)
            zero_grad(run.optimizer)
            run.cursor = advance(run, samples)
            run.watch.saw(run.cursor.step, losses)
            run.step_seconds.append(took := clock.lap())
            run.train_seconds += took
            run.progress.advance(run.cursor.step, run.cursor.epoch)
            if logged:
                write_log(run, losses, samples, norm, lr, clock)
            for callback in run.callbacks:
                callback.on_step(run.cursor.step)
            run.checkpointer.busy(0)  # an async_save that failed ends the run here
            measured = validation_due(run, before)
            if measured:
                validate(run)
            if save_due(run, before, measured):
                save(run, measured)
            if measured or run.saved_step == run.cursor.step:
                clock.lap()  # neither belongs to the next step
        if reason is not None:
            break
    if run.saved_step != run.cursor.step and run.cursor.step > 0:
        save(run, measured=False)
    run.checkpointer.busy(None)
    return reason


def forward_backward(run: Run, batches: Iterator[Batch]) -> tuple[list[Losses], int]:
    """Run the micro-batches of one optimizer step, so that gradients are those of the mean over all its samples.

    Returns:
        The losses of each of this rank's parts; the number of samples of all ranks.
    """
    at, plan, strategy = run.cursor, run.train.plan, run.strategy
    numbers = range(at.batch, min(at.batch + run.trainer.accumulate_grad_batches, plan.num_batches))
    samples = plan.samples(numbers)
    losses: list[Losses] = []
    for part in run.train.parts:
        seed_step(step_key(run.seed, at.step, part), run.devices)
        mine: Losses = []
        with strategy.part(plan.samples(numbers, part) / samples):
            for number in numbers:
                batch = next(batches)
                if batch.share == 0 and not strategy.takes_empty:
                    continue
                share = batch.share * strategy.divisor / samples
                with strategy.accumulate(run.module, share, last=number == numbers[-1]):
                    with run.precision.forward():
                        loss = run.module(batch.data).loss
                    if strategy.stages == 1:  # else the pipeline's schedule has run backward already
                        run.precision.backward(loss if share == 1 else loss * share)
                mine.append((loss.detach(), batch.share))
        losses.append(mine)
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
    elif limit is not None:
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


def write_log(run: Run, losses: Sequence[Losses], samples: int, norm: Tensor | None, lr: float, clock: "Clock") -> None:
    """Log a step: the one place where a step waits for the device, and for the other ranks' losses."""
    of_parts = [sum(loss.item() * share for loss, share in part) / samples for part in losses]
    values = {
        "train/loss": run.strategy.sum(torch.tensor(of_parts, dtype=torch.float64, device=run.devices[-1])).item(),
        "train/lr": lr,
        "train/samples_per_second": clock.samples_per_second(run.cursor),
        "train/epoch": run.cursor.epoch + run.cursor.batch / len(run.train),
    }
    if norm is not None:
        values["train/grad_norm"] = norm.item()
    run.metrics.update(values)
    run.logger.scalars(values, run.cursor.step)
    run.progress.metrics(values)
    run.watch.check_loss(run.cursor.step, values["train/loss"], run.good_step)


def validate(run: Run) -> None:
    """Evaluate on the validation set, log it, and tell the callbacks."""
    assert run.val is not None
    metrics = evaluate(run.task, run.val, run.strategy, "val", run.precision)
    check_monitor(run.monitor, {**run.metrics, **metrics})
    run.metrics.update(metrics)
    run.logger.scalars(metrics, run.cursor.step)
    shown = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
    log.info("epoch %d  step %d  %s", run.cursor.epoch, run.cursor.step, shown)
    for callback in run.callbacks:
        callback.on_validation(run.cursor.step, run.metrics)
    run.task.train()


def evaluate(task: Task, loader: Loader, strategy: Strategy, prefix: str, precision: Precision) -> Metrics:
    """Return the loss and metrics of a data set, every sample counted once at any world size.

    The bare module is run, not the strategy's wrapper, so ranks may have different numbers of batches.
    """
    strategy.sync_buffers(task)
    task.eval()
    for metric in task.stateful_metrics.values():
        metric.reset()
    sums: dict[str, Tensor] = {}  # name -> for each part the sum over samples and their number, [parts, 2], float64
    with torch.no_grad(), precision.forward():
        for batch in loader.batches(epoch=0):
            if batch.share == 0 and sums:
                continue
            output = task.validation_step(batch.data)
            values = {"loss": output.loss, **output.metrics}
            if batch.share == 0:  # only the names count: fewer samples than ranks
                values = {name: value.new_zeros(0) for name, value in values.items()}
                for metric in task.stateful_metrics.values():
                    metric.reset()
            for name, value in values.items():
                weight = output.weight if value.dim() == 0 else len(value)
                summed = value.double() * weight if value.dim() == 0 else value.double().sum()
                counted = torch.stack([summed, torch.full_like(summed, weight)]).to(loader.device)
                if name not in sums:
                    sums[name] = counted.new_zeros(len(loader.parts), 2)
                sums[name][batch.part - loader.parts[0]].add_(counted)
    totals = strategy.sum(torch.stack(list(sums.values()), dim=1))
    metrics = {f"{prefix}/{name}": total / count for name, (total, count) in zip(sums, totals.tolist(), strict=True)}
    with warnings.catch_warnings():
        # torchmetrics warns of a metric without an update; a rank without a sample is no mistake.
        warnings.filterwarnings("ignore", "The ``compute`` method", UserWarning)
        return metrics | {f"{prefix}/{name}": float(metric.compute()) for name, metric in task.stateful_metrics.items()}


def check_monitor(monitor: str, metrics: Metrics) -> None:
    """Refuse a metric to monitor that nothing measures.

    Raises:
        RequestError: lists the metrics there are.
    """
    if monitor not in metrics and not monitor.startswith("train/"):
        raise RequestError(
            f"checkpoint.monitor={monitor} is not measured. Measured are: {', '.join(sorted(metrics))}."
            f"{nearest(monitor, metrics)}"
        )


def validation_due(run: Run, before: Cursor) -> bool:
    """Whether the step just done reached a boundary of ``val_check_interval`` in an epoch that is validated."""
    if run.val is None or (before.epoch + 1) % run.trainer.check_val_every_n_epoch:
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
    return validated if run.val is not None else epoch_over


def save(run: Run, measured: bool) -> None:
    """Save a checkpoint; ``measured`` says that the monitored metric belongs to this very step.

    Weights that are no numbers end the run instead, so the newest checkpoint is always a good one.
    """
    run.logger.flush()  # or a kill would take points with it that do not come again
    fresh = measured or run.monitor.startswith("train/")
    value = run.metrics.get(run.monitor) if fresh else None
    bad = not_finite(run.task)
    await_writer(run, bad)
    run.checkpointer.save(gather_state(run), run.cursor.step, value)
    if not run.checkpoint.async_save:
        await_writer(run, bad)
    run.saved_step = run.cursor.step
    if run.checkpoint.enabled and not run.trainer.fast_dev_run:
        run.good_step = run.saved_step
    for callback in run.callbacks:
        callback.on_save(run.cursor.step)


def await_writer(run: Run, bad: Mapping[str, bool]) -> None:
    """Wait on all ranks until rank 0 has written, however long it takes: it joins a collective now and then meanwhile.

    So none times out because of a slow disk, and one does if rank 0 is dead or stopped. All learn at the same time
    whether some rank has weights that are no numbers.
    """
    writing = 1
    while writing:
        mine = [[int(run.checkpointer.busy(SIGN_OF_LIFE_S)), sum(bad.values())]]
        writing, bad_anywhere = run.strategy.sum(torch.tensor(mine, device=run.devices[0])).tolist()
        if bad_anywhere:
            run.watch.end_for_weights(run.cursor.step, bad, run.good_step)


def gather_state(run: Run) -> State:
    """Return all that a resume needs: weights, optimizer, scheduler, scaler, callbacks and the cursor."""
    return {
        "model": run.strategy.weights(run.task),
        "optimizer": run.strategy.optimizer_state(run.optimizer),
        "scheduler": run.schedule.scheduler.state_dict(),
        "precision": run.precision.state(),
        "callbacks": [callback.state() for callback in run.callbacks],
        "cursor": run.cursor._asdict(),
        "metrics": dict(run.metrics),
        "seed": run.seed,
        "global_batch_size": run.train.plan.global_batch_size,
        "world_size": run.world.world_size,
        "shards": run.shards,
    }


def restore(run: Run, state: State) -> None:
    """Take up a saved state, whose weights the task has already."""
    run.optimizer.load_state_dict(state["optimizer"])
    run.schedule.scheduler.load_state_dict(state["scheduler"])
    run.precision.load_state(state["precision"])
    for callback, saved in zip(run.callbacks, state["callbacks"], strict=False):
        callback.load_state(saved)
    run.cursor = Cursor(**state["cursor"])
    run.samples_before = run.cursor.samples_seen
    run.metrics.update(state["metrics"])
    run.saved_step = run.good_step = run.cursor.step


def _reason_to_stop(run: Run) -> str | None:
    at, limits = run.cursor, run.trainer
    if limits.max_epochs is not None and at.epoch >= limits.max_epochs:
        return "finished"
    if limits.max_steps is not None and at.step >= limits.max_steps:
        return "finished"
    if any(callback.stop for callback in run.callbacks):
        return "finished"
    return run.stopper.reason(at.step)


class Clock:
    """Time of steps, and samples a second since it was last asked."""

    def __init__(self, cursor: Cursor) -> None:
        self._lap = self._asked = time.perf_counter()
        self._seen = cursor.samples_seen

    def lap(self) -> float:
        """Return the seconds since the last lap."""
        now = time.perf_counter()
        seconds, self._lap = now - self._lap, now
        return seconds

    def samples_per_second(self, cursor: Cursor) -> float:
        """Return samples a second over all ranks since this was last called."""
        now = time.perf_counter()
        rate = (cursor.samples_seen - self._seen) / (now - self._asked)
        self._asked, self._seen = now, cursor.samples_seen
        return rate
