"""One optimizer step: forward and backward of its micro-batches, clip, step."""

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ddp_recipes.data.loader import Batch
from ddp_recipes.devices import sum_dtype
from ddp_recipes.runtime.phases import ALL_REDUCE, CALLS, phase
from ddp_recipes.training.guards import Losses, of_rows
from ddp_recipes.training.metrics import mean_loss, train_metrics
from ddp_recipes.training.state import Run, Update

log = logging.getLogger(__name__)


def update(run: Run, batches: Iterator[Batch], measured: bool) -> Update:
    """Take one optimizer step with the next of ``batches``; ``measured`` asks for the gradient's norm."""
    losses, samples, sums = forward_backward(run, batches, measured and run.task.train_metrics)
    # Before the weights change, so that a rank that has changed them needs no other one for the rest of the step.
    loss = mean_loss(run, losses, samples) if measured else None
    metrics = train_metrics(run, losses, sums)
    with phase("optimizer"):
        norm = clip(run, measured)
        lr = rate(run)
        if run.together:
            run.strategy.sum(torch.zeros(1, device=run.devices[0]))  # the last collective of the step
        run.strategy.exchanges.synchronize()
        run.precision.step(run.optimizer)
        CALLS.zero_grad(run.optimizer)
    return Update(losses, samples, norm, lr, loss, metrics)


def rate(run: Run) -> float | Tensor:
    """Return the learning rate of the first parameter group as it is now: schedulers write to one that is a tensor."""
    lr: float | Tensor = run.optimizer.param_groups[0]["lr"]
    return lr.clone() if isinstance(lr, Tensor) else lr


class MicroBatch(NamedTuple):
    """What one forward and backward pass of an optimizer step takes.

    Attributes:
        shard: which of this rank's shards it belongs to, from 0.
        weight: of its loss, so that gradients are those of the mean over all samples of the step.
        last: whether it ends its shard.
        amount: samples that its loss counts for.
    """

    batch: Batch
    shard: int
    weight: float
    last: bool
    amount: float


def micro_batches(
    run: Run, batches: Iterator[Batch], numbers: range, samples: int, amounts: Iterator[float] | None = None
) -> Iterator[MicroBatch]:
    """Yield those of one optimizer step on this rank, each with the randomness and in the context of its shard.

    One without a sample is left out where the strategy does not ask for it.

    Args:
        numbers: of the global batches that the step accumulates, which have so many ``samples``.
        amounts: of each batch the samples that its loss counts for, where that is not as many as it has.
    """
    at, plan, strategy = run.cursor, run.train.plan, run.strategy
    run.task.position.step = at.step + 1
    for place, shard in enumerate(run.train.shards):
        run.generators.begin(at.step, shard)
        with strategy.batch_shard(sum(plan.size(number, shard) for number in numbers) / samples):
            for number in numbers:
                with phase("data"):
                    batch = next(batches)
                amount = batch.num_samples if amounts is None else next(amounts)
                if batch.num_samples or strategy.takes_empty:
                    yield MicroBatch(batch, place, amount * strategy.divisor / samples, number == numbers[-1], amount)
    run.generators.end(at.step)


def weighed(
    run: Run, batches: Iterator[Batch], numbers: range, samples: int
) -> tuple[Iterator[Batch], Iterator[float]]:
    """Return the batches of a step, all of them fetched, and the samples that the loss of each counts for.

    These are in proportion to what it is the mean over, and as many in all as the step has. A collective, and a wait
    for the device.
    """
    with phase("data"):
        every = [[next(batches) for _ in numbers] for _ in run.train.shards]
    nothing = torch.zeros((), dtype=sum_dtype(run.devices[-1]), device=run.devices[-1])

    def amount(batch: Batch) -> Tensor:
        return run.task.amount(batch.data).to(nothing) if batch.num_samples else nothing

    rows = torch.stack([torch.stack([*map(amount, shard)]) for shard in every])
    total = float(run.strategy.sum(rows.sum(dim=1)))
    amounts = [amount * samples / total if total else 0.0 for amount in rows.flatten().tolist()]
    return iter([each for shard in every for each in shard]), iter(amounts)


def of_step(run: Run) -> tuple[range, int]:
    """Return the numbers of the global batches that the next optimizer step accumulates, and of their samples."""
    numbers = run.train.ahead(run.cursor.batch, run.trainer.accumulate_grad_batches)
    return numbers, sum(map(run.train.plan.size, numbers))


def forward_backward(
    run: Run, batches: Iterator[Batch], measured: bool = False
) -> tuple[list[Losses], int, list[dict[str, Tensor]]]:
    """Run the micro-batches of one optimizer step, so that gradients are those of the mean over all its samples.

    Returns:
        The losses of each of this rank's shards; the number of samples of all ranks; if ``measured`` is set, the
        metrics' sums over each of this rank's shards.
    """
    losses: list[Losses] = [[] for _ in run.train.shards]
    sums: list[dict[str, Tensor]] = [{} for _ in losses] if measured else []
    if measured:
        for metric in run.task.stateful_metrics.values():
            metric.reset()
    numbers, samples = of_step(run)
    amounts = None
    if run.task.weighs:
        batches, amounts = weighed(run, batches, numbers, samples)
    first = run.world.is_main and run.cursor.samples_seen == run.samples_before
    for batch, shard, weight, last, amount in micro_batches(run, batches, numbers, samples, amounts):
        if first and (key := run.task.ignored(batch.data)):
            log.warning(
                "The first batch has targets that do not count. Its loss is a mean over those that do, but batches of "
                "ranks and accumulated ones weigh as much as their samples: with others the numbers are others. Set %s "
                "to have them weigh as much as their targets.",
                key,
            )
        first = False
        if measured:
            run.task.train_sums = sums[shard] if batch.num_samples else None
        with of_rows(run.strategy, run.train, "train", batch):
            loss = run.strategy.training_step(run.module, batch.data, weight, last, run.precision)
        losses[shard].append((loss, amount))
    if measured:
        run.task.train_sums = None
    with phase(ALL_REDUCE):
        run.strategy.reduce()
    return losses, samples, sums


def clip(run: Run, measured: bool) -> Tensor | None:
    """Clip gradients as configured; return their norm before that if it was needed or ``measured`` is set."""
    if run.trainer.gradient_clip_val is None and not measured:
        return None
    run.precision.unscale(run.optimizer)
    return clip_unscaled(run, measured)


def clip_unscaled(run: Run, measured: bool) -> Tensor | None:
    """Do the same once gradients are those of the unscaled loss."""
    limit, algorithm = run.trainer.gradient_clip_val, run.trainer.gradient_clip_algorithm
    parameters = [parameter for group in run.optimizer.param_groups for parameter in group["params"]]
    norm = None
    if measured or (limit is not None and algorithm == "norm"):
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = run.strategy.norm([each.coalesce() if each.is_sparse else each for each in gradients])
    if limit is not None:
        clip_to(parameters, limit, norm if algorithm == "norm" else None)
    return norm


def clip_to(parameters: Sequence[nn.Parameter], limit: float, norm: Tensor | None) -> None:
    """Clip gradients to a limit of the ``norm`` that they have; without it each of their values."""
    if norm is not None:
        nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    elif any(parameter.grad is not None for parameter in parameters):  # else torch fails
        nn.utils.clip_grad_value_(parameters, limit)


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer cannot step without a closure, which it may call several times (``LBFGS``)."""
    return _has_to_get_a_closure(type(optimizer).step)


@cache  # each step asks
def _has_to_get_a_closure(step: Callable[..., Any]) -> bool:
    closure = inspect.signature(step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty
