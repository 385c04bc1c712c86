"""What a module written for Lightning calls on itself: ``self.log``, ``self.optimizers()``, …"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ddp_recipes.errors import RequestError, RunFailed
from ddp_recipes.lightning.hooks import LIGHTNING_MODULE, LOGGING, OF_EVALUATION, OF_STEP, overridden
from ddp_recipes.lightning.update import backward
from ddp_recipes.strategies.base import by_rank
from ddp_recipes.tasks import RunContext
from ddp_recipes.training.guards import against_all, reason_against_all, refused_collective
from ddp_recipes.training.update import clip_to

if TYPE_CHECKING:
    from ddp_recipes.lightning.adapter import LightningTask

messages = logging.getLogger(__name__)

_DIMENSIONS = 16  # at most, of what is gathered
_STEPS = ("training_step", "validation_step", "test_step")
_NAMES = ("log", "log_dict", "optimizers", "lr_schedulers", "manual_backward", "clip_gradients", "all_gather", "print")


def _put_below(model: nn.Module, names: Collection[str]) -> None:
    """Have methods of a module's own find ours by ``super()``, by a class between theirs and Lightning's."""

    def method(name: str) -> Any:
        return lambda module, *arguments, **options: getattr(module.trainer.services, name)(*arguments, **options)

    cls = type(model)
    base = next(each for each in cls.__mro__ if each.__name__ == LIGHTNING_MODULE)
    ours = type(base.__name__, (base,), {name: method(name) for name in names})
    model.__class__ = type(cls.__name__, (cls, ours), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})


class Services:
    """Methods that the task gives its module, in place of Lightning's."""

    def __init__(self, task: LightningTask) -> None:
        self.task = task
        model: Any = task.model
        model.trainer = task.trainer
        own = overridden(model, _NAMES)
        for name in {*_NAMES} - own:
            setattr(model, name, getattr(self, name))
        if own:
            _put_below(model, own)
        if not hasattr(type(model), "logger"):
            model.logger = task.trainer.logger

    def print(self, *arguments: Any, **options: Any) -> None:
        self.task.trainer.print(*arguments, **options)

    def log(  # noqa: PLR0913 - the arguments of LightningModule.log
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        *_: Any,
        batch_size: int | None = None,
        add_dataloader_idx: bool = True,
        rank_zero_only: bool = False,
        **__: Any,
    ) -> None:
        """Take a value under a name, as ``LightningModule.log`` does."""
        task, hook = self.task, self.task.hooks.current
        owner, trainer = type(task.model).__name__, task.trainer
        if hook not in LOGGING:
            raise RequestError(f"{owner} logs {name} in {hook or 'no hook'}, where Lightning does not allow it.")
        if hook not in OF_STEP | OF_EVALUATION and (on_step or on_epoch is False):
            raise RequestError(
                f"{owner} logs {name} in {hook} with on_step={on_step} and on_epoch={on_epoch}, which is not called "
                f"for each batch. Leave both out."
            )
        size = float(batch_size or task.samples) * task.counts
        evaluates = trainer.stage != "train" or "validation" in hook or "test" in hook
        step = hook in OF_STEP if on_step is None else on_step
        epoch = hook not in OF_STEP if on_epoch is None else on_epoch
        log = task.evaluation_log if evaluates else task.training_log
        if name == "step" and logger is not False:
            logger = False
            if name not in log.names and trainer.is_global_zero:
                messages.warning("%s logs step, at which Lightning logs all else. Here that is the optimizer's.", owner)
        several = add_dataloader_idx and hook in OF_EVALUATION and trainer.evaluates_several
        of_set = f"/dataloader_idx_{task.dataloader_idx}" if several else ""
        options = {"reduce_fx": reduce_fx, "logger": logger is not False, "alone": rank_zero_only}
        key = log.key(hook, name, value, of_set, on_step=step, on_epoch=epoch, **options)
        if evaluates and step and epoch:
            log.unlogged.add(key.plain)  # it is there for callbacks
        if evaluates and epoch and hook.endswith("_step") and key[5:] == ("mean", False, False):
            # Exactly, by samples: as evaluations measure whatever is measured.
            values = log.number(name, value).expand(int(size or 1))
            for each in dict.fromkeys((key.plain, key.of_epoch)):
                task.of_step.setdefault(each, []).append(values)
            if not step:
                return
            key = key._replace(on_epoch=False, name=f"{name}_step")
        log.add(key, value, size, task.at)

    def log_dict(self, dictionary: Mapping[str, Any], *arguments: Any, **options: Any) -> None:
        """Take several, by the module's ``log``, which may be its own."""
        for name, value in dictionary.items():
            self.task.model.log(name, value, *arguments, **options)  # type: ignore[operator]

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """Return the optimizers, which take the gradients of all ranks where the module steps them itself."""
        task = self.task
        found = task.events.optimizers if use_pl_optimizer else list(task.trainer.optimizers)
        return found[0] if len(found) == 1 else found

    def lr_schedulers(self) -> Any:
        found = [each.scheduler for each in self.task.trainer.lr_scheduler_configs]
        return None if not found else found[0] if len(found) == 1 else found

    def manual_backward(self, loss: Tensor, *arguments: Any, **options: Any) -> None:
        """Run backward, for the gradients of all ranks. A collective."""
        self.task.hooks("on_before_backward", loss)
        backward(self.task, loss if self.task.weight == 1 else loss * self.task.weight, *arguments, **options)
        self.task.hooks("on_after_backward")

    def clip_gradients(
        self,
        optimizer: Any,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the gradients of an optimizer's parameters, as ``trainer.gradient_clip_*`` say where nothing else is."""
        settings = self.task.trainer.run_context.trainer
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if gradient_clip_val is None:
            gradient_clip_val = settings.gradient_clip_val
        if not gradient_clip_val or not parameters:
            return
        assert self.task.trainer.run is not None
        by_value = (gradient_clip_algorithm or settings.gradient_clip_algorithm).lower() == "value"
        norm = None if by_value else self.task.trainer.run.strategy.norm([p.grad for p in parameters])
        clip_to(parameters, gradient_clip_val, norm)

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Return a value of each rank, [ranks, ...]; ``sync_grads``: gradients go back to it. A collective."""
        if isinstance(data, Mapping):
            return {name: self.all_gather(value, group, sync_grads) for name, value in data.items()}
        if isinstance(data, (list, tuple)):
            return type(data)(self.all_gather(value, group, sync_grads) for value in data)
        context = self.task.trainer.run_context
        value = torch.as_tensor(data, device=context.devices[0])
        if context.world.world_size == 1:
            return value
        self.refuse_in_step("self.all_gather")
        _check_alike(value, context)
        return _Gathered.apply(value if sync_grads else value.detach(), context)

    def refuse_in_step(self, called: str) -> None:
        """Refuse a collective in a step that some ranks do not take: of an evaluation, or of some strategies any.

        Raises:
            RequestError: says what to do instead.
        """
        context, hook = self.task.trainer.run_context, self.task.hooks.current
        reason = reason_against_all(context.parallelism, context.world) if hook in _STEPS else None
        if reason is not None:
            raise against_all(called, context.parallelism, reason)
        if hook in OF_EVALUATION:
            uneven = [name for name, loader in context.loaders.items() if name != "train" and not loader.is_even]
            if uneven:
                raise refused_collective(called, uneven[0], context.loaders[uneven[0]])


def _check_alike(value: Tensor, context: RunContext) -> None:
    """Refuse a value of another shape on another rank. A collective.

    Raises:
        RunFailed: says which shapes there are.
    """
    mine = torch.tensor([value.dim(), *value.shape, *[0] * (_DIMENSIONS - value.dim())], device=context.devices[0])
    shapes = [row[1 : 1 + row[0]] for row in by_rank(mine, context.world, context.sum).tolist()]
    if (other := next((rank for rank, shape in enumerate(shapes) if shape != shapes[0]), None)) is not None:
        raise RunFailed(
            f"self.all_gather is given {shapes[0]} on rank 0 and {shapes[other]} on rank {other}. Ranks may have "
            f"different numbers of samples in the last batch of an epoch, and in all of an evaluation. Choose batch "
            f"sizes such that the ranks divide all batches (in training data.drop_last=true), pad what is gathered, or "
            f"use a metric of torchmetrics."
        )


class _Gathered(torch.autograd.Function):
    """A value of each rank, whose gradient is the sum of what all ranks have for it."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, context: RunContext) -> Tensor:
        ctx.context = context
        return by_rank(value, context.world, context.sum)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.context.sum(gradient[None])[ctx.context.world.rank], None
