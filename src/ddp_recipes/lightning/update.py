"""An optimizer step of a module written for Lightning, its hooks called in Lightning's order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ddp_recipes.data.loader import Batch
from ddp_recipes.runtime.fast_paths import zero_grad
from ddp_recipes.runtime.phases import ALL_REDUCE, phase
from ddp_recipes.training.non_finite import Losses
from ddp_recipes.training.state import Run, Update
from ddp_recipes.training.update import MicroBatch, clip_unscaled, micro_batches, of_step

if TYPE_CHECKING:
    from ddp_recipes.lightning.adapter import LightningTask


def automatic(task: LightningTask, run: Run, batches: Iterator[Batch], measured: bool) -> Update:
    """Take an optimizer step as the loop does; the module may have a say in each part of it."""
    hooks, plan = task.hooks, run.train.plan
    numbers, samples = of_step(run)
    total = sum(
        run.strategy.takes_empty or plan.size(number, shard) > 0 for number in numbers for shard in run.train.shards
    )
    losses: list[Losses] = [[] for _ in run.train.shards]
    precision = _Backward(task, run)
    norm: list[Tensor | None] = [None]
    lr = run.optimizer.param_groups[0]["lr"]

    def forward_backward(each: MicroBatch) -> Tensor:
        loss = run.strategy.training_step(run.module, each.batch.data, each.weight, each.last, precision)
        losses[each.shard].append((loss, each.batch.num_samples))
        return loss

    def gradients(each: MicroBatch | None) -> Tensor | None:
        """What Lightning calls the closure: ends with the clipped gradients of the whole step."""
        with torch.enable_grad():
            loss = None if each is None else forward_backward(each)
        next(passes, None)  # there is none: the context of the last shard ends
        with phase(ALL_REDUCE):
            run.strategy.reduce()
        run.precision.unscale(run.optimizer)
        hooks("on_before_optimizer_step", run.optimizer)
        norm[0] = _clip(task, run, measured)
        return loss

    passes = micro_batches(run, batches, numbers, samples)
    for number, each in enumerate(passes, start=1):
        if len(losses) == 1:
            task.training_log.forget_steps()  # as in Lightning, the last of accumulated batches is what is logged
        each = task.begin_batch(each)
        if number < total:
            forward_backward(each)
            task.end_batch()
        else:
            _step(task, run, partial(gradients, each))
    if not total:  # no sample of this step is on this rank, but its parameters change all the same
        _step(task, run, partial(gradients, None))
    return Update(losses, samples, norm[0], lr)


def _step(task: LightningTask, run: Run, closure: Any) -> None:
    """Step the optimizer, which calls the closure first; the module may do it by itself."""
    if "optimizer_step" in task.hooks.own:
        task.hooks.of_module("optimizer_step", task.trainer.epoch, task.batch_idx, run.optimizer, closure)
        return
    closure()
    with phase("optimizer"):
        run.precision.step(run.optimizer)


def _clip(task: LightningTask, run: Run, measured: bool) -> Tensor | None:
    """Clip as the module says, else as configured."""
    if "configure_gradient_clipping" not in task.hooks.own:
        return clip_unscaled(run, measured)
    limit, algorithm = run.trainer.gradient_clip_val, run.trainer.gradient_clip_algorithm
    gradients = [p.grad for group in run.optimizer.param_groups for p in group["params"] if p.grad is not None]
    norm = run.strategy.norm(gradients) if measured else None
    task.hooks.of_module("configure_gradient_clipping", run.optimizer, limit, algorithm)
    return norm


class _Backward:
    """The run's precision, with the hooks around a backward pass."""

    def __init__(self, task: LightningTask, run: Run) -> None:
        self.task, self.run = task, run
        self.first = True  # of the step: gradients of the one before are still there

    def forward(self) -> AbstractContextManager[Any]:
        """Return the context of a forward pass."""
        return self.run.precision.forward()

    def backward(self, loss: Tensor) -> None:
        """Clear the gradients of the step before, then run backward."""
        hooks, optimizer = self.task.hooks, self.run.optimizer
        if self.first:
            self.first = False
            hooks("on_before_zero_grad", optimizer)
            if "optimizer_zero_grad" in hooks.own:
                hooks.of_module("optimizer_zero_grad", self.task.trainer.epoch, self.task.batch_idx, optimizer)
            else:
                zero_grad(optimizer)
        hooks("on_before_backward", loss)
        if "backward" in hooks.own:
            hooks.of_module("backward", loss)
        else:
            self.run.precision.backward(loss)
        hooks("on_after_backward")


def manual(task: LightningTask, run: Run, batches: Iterator[Batch], measured: bool) -> Update:
    """Let the module run backward and step its optimizers; each step takes the gradients of all ranks."""
    lr = run.optimizer.param_groups[0]["lr"]
    losses: list[Losses] = [[]]
    numbers, samples = of_step(run)
    for each in micro_batches(run, batches, numbers, samples):
        each = task.begin_batch(each)
        task.weight = each.weight / run.strategy.divisor
        with run.precision.forward():
            loss = task.training_step(each.batch.data).loss
        if loss.dim() == 0:
            losses[0].append((loss.detach(), each.batch.num_samples))
    return Update(losses if losses[0] else [], samples, None, lr)


class ManualOptimizer:
    """What ``self.optimizers()`` gives a module that steps by itself: an optimizer whose step sums over ranks first."""

    def __init__(self, task: LightningTask, run: Run, optimizer: torch.optim.Optimizer) -> None:
        self._task, self._run, self.optimizer = task, run, optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.optimizer)  # for isinstance, as modules and torch's schedulers ask

    def step(self, closure: Any = None, **_: Any) -> None:
        """Step with the gradients of the mean over the samples of all ranks. A collective."""
        if closure is not None:
            with torch.enable_grad():
                closure()
        parameters = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        if self._run.world.world_size > 1 and parameters:
            flat = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
            with phase(ALL_REDUCE):
                summed = self._run.strategy.sum(flat[None])
            gradients = torch.split(summed, [p.numel() for p in parameters])
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.view_as(parameter)
        self._task.hooks("on_before_optimizer_step", self.optimizer)
        with phase("optimizer"):
            self.optimizer.step()
        self._task.trainer.steps += 1
