"""Metrics that compute themselves over batches and ranks, and those of training batches."""

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, reduce
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_recipes._compat.torch_ import states_of
from ddp_recipes.config.settings import check_measured
from ddp_recipes.data.loader import Batch, Loader
from ddp_recipes.devices import for_sums, sum_dtype
from ddp_recipes.errors import RequestError, RunFailed
from ddp_recipes.loggers import Logger
from ddp_recipes.runtime.phases import phase
from ddp_recipes.runtime.seeding import key, seed_step
from ddp_recipes.strategies import Strategy
from ddp_recipes.strategies.collectives import broadcast, gather
from ddp_recipes.tasks import Task
from ddp_recipes.tasks.metrics import is_stateful, of_samples, summed
from ddp_recipes.tasks.task import output_of
from ddp_recipes.training.cadence import ValidationStopped
from ddp_recipes.training.guards import Losses, of_rows
from ddp_recipes.training.precision import Precision
from ddp_recipes.training.state import Metrics, Run

Matrices = dict[str, Tensor]  # by the names of metrics


def computed(task: Task, prefix: str, matrices: Matrices) -> Metrics:
    """Return what a task's torchmetrics come to over all ranks. A collective.

    Args:
        matrices: gets those that are square matrices.

    Raises:
        RequestError: one is neither a number nor a square matrix, or matplotlib, which draws it, is not installed.
    """
    metrics: Metrics = {}
    with warnings.catch_warnings():
        # torchmetrics warns of a metric without an update; a rank without a sample is no mistake.
        warnings.filterwarnings("ignore", "The ``compute`` method", UserWarning)
        agree_on_states(task.stateful_metrics.values())
        values = {name: metric.compute() for name, metric in task.stateful_metrics.items()}
    for name, value in values.items():
        for own, each in value.items() if isinstance(value, Mapping) else [(name, value)]:
            if _is_matrix(each):
                matrices[task.metric_name(prefix, own)] = each
            elif (isinstance(each, Tensor) and each.numel() != 1) or isinstance(each, (tuple, list)):
                shape = f"a tensor {list(each.shape)}" if isinstance(each, Tensor) else f"a {type(each).__name__}"
                raise RequestError(
                    f"task.metrics.{own} computes {shape}. Allowed: a number, and a square matrix, which is drawn. Ask "
                    f"the metric for one number, e.g. by average: macro, or wrap it in torchmetrics.ClasswiseWrapper."
                )
            else:
                metrics[task.metric_name(prefix, own)] = float(each)
    if matrices and find_spec("matplotlib") is None:
        raise RequestError(
            f"{', '.join(matrices)} is a matrix, which matplotlib draws, and it is not installed. Install "
            f"ddp-recipes[figures], or leave the metric out."
        )
    return metrics


def agree_on_states(metrics: Iterable[Any]) -> None:
    """Give metrics without a sample on this rank states of the form that others have, to be gathered. A collective.

    Else torchmetrics sends an empty list as one of floats, and one number where others have one of each output.
    """
    states = states_of(metrics)
    if not states or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    every: list[list[list[Tensor]]] = broadcast(gather([_form(getattr(*state)) for state in states]), 0)
    for (owner, name), forms in zip(states, zip(*every, strict=True), strict=True):
        state, found = getattr(owner, name), [each for form in forms for each in form]
        if isinstance(state, Tensor):
            shape = max((each.shape[1:] for each in found), key=torch.Size.numel)
            dtype = reduce(torch.promote_types, (each.dtype for each in found))
            if state.dtype != dtype or (state.numel() == 1 and state.shape != shape):
                setattr(owner, name, state.to(dtype).expand(shape).clone())
        elif not state:
            setattr(owner, name, [each.to(owner.device) for each in found[:1]])


def _form(state: Any) -> list[Tensor]:
    """Return what tells the shape and the dtype of a state, and has no number in it; nothing of an empty list."""
    if isinstance(state, Tensor):
        return [state[None][:0]]
    first = next(iter(state), None)
    return [first[:0] if first.dim() else first[None][:0]] if isinstance(first, Tensor) else []


def _is_matrix(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 2 and value.shape[0] == value.shape[1] > 1


def log_matrices(matrices: Matrices, logger: Logger, is_main: bool) -> None:
    """Log a picture of each on the rank that writes."""
    if matrices and is_main:
        from ddp_recipes.reporting.figures.matrix import draw_matrix

        logging.getLogger("matplotlib").setLevel(logging.WARNING)
        for name, matrix in matrices.items():
            logger.image(name, draw_matrix(matrix.tolist(), name))


def mean_loss(run: Run, losses: Sequence[Losses], samples: int) -> Tensor:
    """Return the mean loss over a step's samples of all ranks, given those of this rank's shards. A collective."""
    zero = torch.zeros((), dtype=sum_dtype(run.devices[-1]), device=run.devices[-1])
    sums = [sum((for_sums(loss).to(zero) * count for loss, count in shard if count), zero) for shard in losses]
    return run.strategy.sum(torch.stack(sums) / samples)


def train_metrics(run: Run, losses: Sequence[Losses], sums: Sequence[Mapping[str, Tensor]]) -> Metrics:
    """Return the task's metrics of the batch of a step, over all its samples. A collective where they are measured.

    Args:
        sums: of each metric, over the samples of each of this rank's shards, and their number; empty where they are not
            measured.

    Raises:
        RunFailed: the task's own step does not measure them.
    """
    if not sums:
        return {}
    task = run.task
    names = [name for name, metric in task.metrics.items() if not is_stateful(metric)]
    for of_shard, measured in zip(losses, sums, strict=True):
        if measured.keys() != set(names) and any(size for _, size in of_shard):
            raise RunFailed(
                f"task.train_metrics=true, but {type(task).__name__}.training_step does not measure. Let it return "
                f"self.training_output(outputs, targets), or leave task.train_metrics out."
            )
    found: Metrics = {}
    if names:
        none = torch.zeros(2, dtype=sum_dtype(run.devices[-1]), device=run.devices[-1])
        rows = [torch.stack([measured.get(name, none).to(none) for name in names]) for measured in sums]
        totals = run.strategy.sum(torch.stack(rows)).tolist()
        found = {f"train/{name}": total / count for name, (total, count) in zip(names, totals, strict=True) if count}
    return found | computed(task, "train", {})


log = logging.getLogger(__name__)


def validate(run: Run) -> bool:
    """Evaluate on the validation sets, log it, and tell the callbacks; return whether no signal stopped it."""
    for callback in run.callbacks.values():
        callback.on_validation_start(run.cursor.step)
    matrices: Matrices = {}
    known = run.strategy.moved

    def look(batch: int) -> None:
        if not run.task.is_altered:
            run.stop_controller.check_validation(batch)

    try:
        metrics = evaluate(run.task, run.val, run.strategy, run.precision, matrices, look)
    except ValidationStopped:
        _end_validation(run)
        return False
    if warning := settle_monitor(run, {**run.metrics, **metrics}):
        log.warning(warning)
    moved = sorted(name.removeprefix("model.") for name in run.strategy.moved - known)
    if moved and run.world.is_main:
        log.warning(
            "The validation has moved the buffers %s. Each rank has seen other samples, so what they were before is "
            "put back: with strategy=%s only training moves buffers.",
            ", ".join(moved),
            run.strategy.settings.name,
        )
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
    strategy.exchanges.synchronize()  # metrics have collectives of their own
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
    nothing = torch.zeros(len(loader.shards), 2, dtype=sum_dtype(loader.device), device=loader.device)
    sums: dict[str, Tensor] = {}  # name -> for each shard the sum over samples and their number, [shards, 2]
    with phase("validation"), torch.no_grad(), strategy.evaluation(task):
        for batch in batches:
            if batch.num_samples == 0 and sums:
                if strategy.settings.kind == "sharded":  # the others wait for this rank in the model
                    with _unmeasured(task), precision.forward():
                        step(batch.data)
                continue
            counts = nullcontext() if batch.num_samples else task.uncounted()
            with within(), of_rows(strategy, loader, prefix, batch), precision.forward(), counts:
                output = output_of(step, batch.data)
            values = {"loss": output.loss, **output.metrics}
            if batch.num_samples == 0:  # only the names count: fewer samples than ranks
                values = dict.fromkeys(values, torch.empty(0))
            samples = batch.num_samples if output.weight is None else output.weight
            for name, given in values.items():
                value = of_samples(name, given, 1 if task.names_metrics else samples)  # these say of how many
                pair = summed(value, samples)
                if name == "loss" and output.amount is not None and value.dim() == 0:
                    over = output.amount.to(value)  # of none torch's mean is NaN
                    pair = torch.stack([torch.where(over > 0, value * over, 0.0), over])
                sums.setdefault(name, nothing.clone())[loader.shards.index(batch.shard)].add_(pair.to(nothing))
    names = task.everywhere(list(sums))
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
        task.position.batch, task.position.shard, task.position.seed = batch.number, batch.shard, loader.plan.seed
        task.position.indices = partial(loader.plan.indices, 0, batch.number, batch.shard)
        yield batch


def settle_monitor(run: Run, metrics: Metrics) -> str | None:
    """Check the metric to monitor against those of a validation, the first of which shows whether there is a loss.

    Returns:
        A warning where there is none, so that the loss of training is followed.

    Raises:
        RequestError: lists the metrics there are.
    """
    if run.auto_monitor and run.task.names_metrics and run.monitor not in ("train/loss", *metrics):
        missing, run.monitor = run.monitor, "train/loss"
        return f"checkpoint.monitor=auto is train/loss, for {missing} is not measured."
    by_training = run.monitor.startswith("train/") or run.task.names_metrics  # may measure it
    if run.monitor.startswith("val") or not by_training:
        check_measured(run.monitor, metrics)
    return None
