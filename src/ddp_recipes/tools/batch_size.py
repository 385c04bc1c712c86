"""A batch that fits: ``tune=batch_size`` cuts the global batch into passes and looks which way is fastest."""

import gc
import logging
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ddp_recipes._compat.messages import out_of_memory
from ddp_recipes.build.recipe import Recipe
from ddp_recipes.build.run import make_run, make_stop_controller
from ddp_recipes.data.order import BatchPlan
from ddp_recipes.devices import empty_cache, is_accelerator, memory_limited, sum_dtype
from ddp_recipes.errors import RequestError, RunFailed
from ddp_recipes.output import Output
from ddp_recipes.strategies import Single
from ddp_recipes.strategies.base import by_rank
from ddp_recipes.tools.learning_rate import stepped
from ddp_recipes.training.cadence import Cursor
from ddp_recipes.training.state import Run

log = logging.getLogger(__name__)

WARM_UP = 1  # steps of a trial that do not count
AS_FAST = 1.03  # times the fastest: of ways that differ by no more, the one with the fewest passes
TOO_SLOW = 1.25  # times the fastest, which is where the search ends
HEADROOM = 0.95  # of a GPU's memory; the rest is for libraries and fragments


class Trial(NamedTuple):
    """What a way of cutting the global batch came to.

    Attributes:
        batch: samples of all ranks in a pass.
        passes: of an optimizer step.
        seconds: of an optimizer step, on the slowest rank.
    """

    batch: int
    passes: int
    seconds: float


def tune(recipe: Recipe, output: Output) -> None:
    """Take a few optimizer steps for each way to cut the global batch, largest passes first; show the fastest.

    A rank takes them by itself, without a collective, so that one that runs out of memory leaves no other waiting.

    Raises:
        RequestError: the strategy or the module does not accumulate passes as the loop does.
        RunFailed: nothing fits.
    """
    refuse(recipe)
    plan, passes = recipe.loaders["train"].plan, recipe.trainer.accumulate_grad_batches
    world, several = recipe.world, recipe.strategy.replicas(recipe.device.type)
    kept: Sequence[Tensor] = ()
    if world.world_size > 1:
        with suppress(RequestError):  # a strategy need not know what it keeps
            kept = [torch.empty_like(each) for each in recipe.strategy.exchange(recipe.task, world).held]
    output.hold(memory_limited(recipe.device, HEADROOM))
    run = make_run(recipe, make_stop_controller(recipe), Single() if several == 1 else recipe.strategy)
    run.schedules = []
    output.open(None)
    log.info("A step takes %d samples, by %d ranks.", plan.global_batch_size * passes, world.world_size)
    trials: list[Trial] = []
    for batch, count in ways(plan, passes, plan.num_shards * several):
        mine = step_seconds(run, batch, count, recipe.request.run.tune_steps or 4, first=not trials)
        seconds = by_rank(
            torch.tensor(mine, dtype=sum_dtype(recipe.device), device=recipe.device), world, recipe.strategy.sum
        ).tolist()
        way = overrides(recipe, batch, count)
        if without := [str(rank) for rank, value in enumerate(seconds) if math.isinf(value)]:
            log.info("%s: out of memory on rank %s", way, ", ".join(without))
            continue
        if failed := [str(rank) for rank, value in enumerate(seconds) if math.isnan(value)]:
            log.info("%s: the model fails, on rank %s, though not with more samples", way, ", ".join(failed))
            break
        trials.append(Trial(batch, count, max(seconds)))
        log.info("%s: %.4g s a step", way, max(seconds))
        if trials[-1].seconds > TOO_SLOW * min(trial.seconds for trial in trials):
            break
    del kept
    if not trials:
        raise RunFailed(
            f"A pass of {plan.num_shards * several} samples, one for each replica, does not fit. Take "
            f"trainer.precision=bf16-mixed, more devices a replica (model.num_devices), or a smaller model."
        )
    fastest = min(trial.seconds for trial in trials)
    chosen = next(trial for trial in trials if trial.seconds <= AS_FAST * fastest)
    for trial in trials:
        output.logger.scalars({"tune/step_s": trial.seconds, "tune/passes": trial.passes}, trial.batch)
    output.metrics = {
        "tune/global_batch_size": chosen.batch,
        "tune/accumulate_grad_batches": chosen.passes,
        "tune/step_s": chosen.seconds,
    }
    log.info(
        "The fastest that fits: %s, %.4g samples/s. Gradients are those of the same %d samples a step.",
        overrides(recipe, chosen.batch, chosen.passes),
        chosen.batch * chosen.passes / chosen.seconds,
        chosen.batch * chosen.passes,
    )


def refuse(recipe: Recipe) -> None:
    """Refuse what does not accumulate passes as the loop does, or not in one process."""
    strategy = recipe.request.strategy
    if strategy.kind != "replicated":
        how = "cuts a pass into micro-batches over" if strategy.pipeline is not None else "runs one on"
        raise RequestError(
            f"tune=batch_size tries passes of one process, until one is out of memory, and strategy={strategy.name} "
            f"{how} several, which would wait for it. Look with plan=true what each of them holds."
        )
    if not recipe.task.accumulates:
        raise RequestError(
            f"tune=batch_size accumulates passes, and {type(recipe.task.model).__name__} takes its optimizer steps "
            f"itself (automatic_optimization=False). Leave tune out."
        )


def ways(plan: BatchPlan, passes: int, least: int) -> Iterator[tuple[int, int]]:
    """Yield (samples a pass, passes a step) of the same steps as ``passes`` of ``plan``, largest passes first.

    Each but the last is at least 1.5 times the next.

    Args:
        least: samples that a pass must have.
    """
    total, seen = plan.global_batch_size * passes, samples(plan)
    last = math.inf
    for count in range(1, total // least + 1):
        batch, rest = divmod(total, count)
        if rest == 0 and batch * 1.5 <= last and (seen % batch == 0 or seen == plan.num_samples):
            yield batch, count
            last = batch


def samples(plan: BatchPlan) -> int:
    """Return how many samples an epoch has."""
    return min(plan.num_batches * plan.global_batch_size, plan.num_samples)


def overrides(recipe: Recipe, batch: int, passes: int) -> str:
    """Return what the user gives for it; an epoch keeps its length where batches are counted or dropped."""
    plan = recipe.loaders["train"].plan
    found = f"data.global_batch_size={batch} trainer.accumulate_grad_batches={passes}"
    if samples(plan) == plan.num_samples or batch == plan.global_batch_size:
        return found
    key = "overfit_batches" if recipe.trainer.overfit_batches else "limit_train_batches"
    return f"{found} trainer.{key}={samples(plan) // batch}"


def step_seconds(run: Run, batch: int, passes: int, steps: int, first: bool) -> float:
    """Return the time of an optimizer step, the least of ``steps`` after one that does not count.

    Returns:
        In seconds; 0 on a rank that trains on nothing, infinity where there is no memory for it; NaN where the model
        fails, as one with batch norms does of a single sample.

    Raises:
        Exception: what the model raises in the ``first`` trial, with the most samples.
    """
    if not run.train.shards:
        return 0.0
    train = run.train.recut(batch)
    trial = replace(run, train=train, trainer=replace(run.trainer, accumulate_grad_batches=passes), cursor=Cursor())
    times = []
    try:
        taken = stepped(trial)
        for _ in range(WARM_UP + steps):
            began = time.perf_counter()
            next(taken).item()  # waits for the device
            times.append(time.perf_counter() - began)
    except Exception as error:
        if first and not out_of_memory(error):
            raise
        times = [math.inf if out_of_memory(error) else math.nan]
    finally:
        train.close()
        run.optimizer.zero_grad()
    gc.collect()  # the frames of the error hold what there was memory for
    if is_accelerator(run.devices[0]):
        empty_cache()
    return min(times[WARM_UP:] or times)
