"""The loss and metrics of a data set, every sample counted once."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor

from ddp_recipes.config.monitor import check_measured
from ddp_recipes.data.loader import Batch, Loader
from ddp_recipes.runtime.phases import phase
from ddp_recipes.runtime.seeding import key, seed_step
from ddp_recipes.strategies import Strategy
from ddp_recipes.tasks import Task
from ddp_recipes.training.collectives import of_rows
from ddp_recipes.training.metrics import Matrices, computed, log_matrices
from ddp_recipes.training.precision import Precision
from ddp_recipes.training.state import Metrics, Run
from ddp_recipes.training.stopping import ValidationStopped

log = logging.getLogger(__name__)


def validate(run: Run) -> bool:
    """Evaluate on the validation sets, log it, and tell the callbacks; return whether no signal stopped it."""
    for callback in run.callbacks.values():
        callback.on_validation_start(run.cursor.step)
    matrices: Matrices = {}
    try:
        metrics = evaluate(
            run.task, run.val, run.strategy, run.precision, matrices, run.stop_controller.check_validation
        )
    except ValidationStopped:
        _end_validation(run)
        return False
    check_monitor(run, {**run.metrics, **metrics})
    run.metrics.update(metrics)
    run.logger.scalars({k: v for k, v in metrics.items() if k not in run.task.unlogged}, run.cursor.step)
    log_matrices(matrices, run.logger, run.world.is_main)
    shown = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
    log.info("epoch %d  step %d  %s", run.cursor.epoch, run.cursor.step, shown)
    for callback in run.callbacks.values():
        callback.on_validation(run.cursor.step, run.metrics)
    _end_validation(run)
    return True


def _end_validation(run: Run) -> None:
    for callback in run.callbacks.values():
        callback.on_validation_end(run.cursor.step)
    run.task.leave_evaluation()


def evaluate(
    task: Task,
    loaders: Mapping[str, Loader],
    strategy: Strategy,
    precision: Precision,
    matrices: Matrices | None = None,
    before_batch: Callable[[int], None] = lambda batch: None,
    within: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Metrics:
    """Return the loss and metrics of data sets, every sample of each counted once at any world size.

    The bare module is run, not the strategy's wrapper, so ranks may have different numbers of batches.

    Args:
        loaders: by what their metrics' names begin with: ``val``, or ``val/clean`` and ``val/noisy``.
        matrices: gets the metrics that are matrices, for a picture.
        before_batch: called at the same places on every rank, with the batch's number over all data sets.
        within: makes the context of each step.

    The task is in eval mode after it, too, until :meth:`Task.leave_evaluation`.
    """
    strategy.sync_buffers(task)
    split = next(iter(loaders)).partition("/")[0]
    task.enter_evaluation(split)
    metrics: Metrics = {}
    done = 0
    for number, (prefix, loader) in enumerate(loaders.items()):
        task.start_evaluation(split, number)
        batches = _announced(task, loader, done, before_batch)
        found = {} if matrices is None else matrices
        metrics |= _evaluate(task, loader, batches, strategy, prefix, precision, found, within)
        done += len(loader)
    metrics = task.end_evaluation(split, metrics)
    strategy.exchanges.settle()  # metrics have collectives of their own
    return metrics


def _announced(task: Task, loader: Loader, done: int, before_batch: Callable[[int], None]) -> Iterator[Batch]:
    """Yield the batches, each announced once, before its first shard."""
    for batch in evaluated(task, loader):
        if batch.shard == loader.shards[0]:
            before_batch(done + batch.number)
        yield batch


def _evaluate(
    task: Task,
    loader: Loader,
    batches: Iterable[Batch],
    strategy: Strategy,
    prefix: str,
    precision: Precision,
    matrices: Matrices,
    within: Callable[[], AbstractContextManager[object]],
) -> Metrics:
    for metric in task.stateful_metrics.values():
        metric.reset()
    step = task.test_step if prefix.startswith("test") else task.validation_step
    sums: dict[str, Tensor] = {}  # name -> for each shard the sum over samples and their number, [shards, 2], float64
    with phase("validation"), torch.no_grad():
        for batch in batches:
            if batch.num_samples == 0 and sums:
                if strategy.settings.kind == "sharded":  # the others wait for this rank in the model
                    with _unmeasured(task), precision.forward():
                        step(batch.data)
                continue
            counts = nullcontext() if batch.num_samples else task.uncounted()
            with within(), of_rows(strategy, loader, prefix, batch), precision.forward(), counts:
                output = step(batch.data)
            values = {"loss": output.loss, **output.metrics}
            if batch.num_samples == 0:  # only the names count: fewer samples than ranks
                values = {name: value.new_zeros(0) for name, value in values.items()}
            for name, value in values.items():
                weight = output.weight if value.dim() == 0 else len(value)
                summed = value.double() * weight if value.dim() == 0 else value.double().sum()
                over = torch.full_like(summed, weight)
                if name == "loss" and output.amount is not None and value.dim() == 0:
                    over = output.amount.to(summed)
                    summed = torch.where(over > 0, value.double() * over, 0.0)  # of none torch's mean is NaN
                pair = torch.stack([summed, over]).to(loader.device)
                if name not in sums:
                    sums[name] = pair.new_zeros(len(loader.shards), 2)
                sums[name][loader.shards.index(batch.shard)].add_(pair)
    names = task.everywhere(list(sums))
    nothing = torch.zeros(len(loader.shards), 2, dtype=torch.float64, device=loader.device)
    totals = strategy.sum(torch.stack([sums.get(name, nothing) for name in names], dim=1))
    counted = zip(names, totals.tolist(), strict=True)
    metrics = {task.metric_name(prefix, name): total / count for name, (total, count) in counted if count}
    return metrics | computed(task, prefix, matrices)


@contextmanager
def _unmeasured(task: Task) -> Iterator[None]:
    """Leave the metrics as they are."""
    metrics, task.metrics = task.metrics, {}
    try:
        yield
    finally:
        task.metrics = metrics


def evaluated(task: Task, loader: Loader) -> Iterator[Batch]:
    """Yield the batches of a data set that is not trained on, each with random numbers of its own."""
    devices = {parameter.device for parameter in task.parameters()}
    for batch in loader.batches(epoch=0):
        seed_step(key(loader.plan.seed, 0, batch.number, batch.shard), devices)
        task.position.batch, task.position.shard = batch.number, batch.shard
        task.position.indices = partial(loader.plan.indices, 0, batch.number, batch.shard)
        yield batch


def check_monitor(run: Run, metrics: Metrics) -> None:
    """Refuse a metric to monitor that is not among those of a validation, unless training may measure it.

    Raises:
        RequestError: lists the metrics there are.
    """
    if run.monitor.startswith("val") or not (run.monitor.startswith("train/") or run.task.names_metrics):
        check_measured(run.monitor, metrics)
