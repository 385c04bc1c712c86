"""What ``configure_optimizers`` returns, in each of its forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ddp_recipes.errors import RequestError
from ddp_recipes.tasks import OwnOptimizers, Schedule
from ddp_recipes.training.update import needs_closure

if TYPE_CHECKING:
    from ddp_recipes.lightning.adapter import LightningTask

_KEYS = {"scheduler", "interval", "frequency", "monitor", "strict", "name", "reduce_on_plateau"}


def of_module(task: LightningTask) -> OwnOptimizers | None:
    """Return the module's own optimizers and schedules; ``None`` where it does not configure them.

    Where its ``configure_optimizers`` returns ``None``, it has one that changes nothing, as in Lightning.

    Raises:
        RequestError: it returns something else, or several optimizers for the loop to step.
    """
    if "configure_optimizers" not in task.hooks.own:
        return None
    owner = f"{type(task.model).__name__}.configure_optimizers"
    made = task.hooks.of_module("configure_optimizers")
    if made is None:
        made = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.0)
    optimizers, schedulers = _split(made, owner)
    if len(optimizers) != 1 and not task.manual:
        raise RequestError(
            f"{owner} returns {len(optimizers)} optimizers. Several are stepped by the module itself: set "
            f"self.automatic_optimization=False in its __init__, as Lightning asks for."
        )
    context = task.trainer.run_context
    if any(map(needs_closure, optimizers)) and not task.manual:
        name = type(optimizers[0]).__name__
        if context.trainer.precision == "16-mixed" or context.parallelism.kind != "replicated":
            raise RequestError(
                f"{owner} returns {name}, which computes the gradients of a step several times and looks at all of "
                f"them. That does not go with strategy={context.parallelism.name} and "
                f"trainer.precision={context.trainer.precision}: choose 32-true, and a strategy whose ranks have all "
                f"of the weights."
            )
        if context.trainer.accumulate_grad_batches > 1:
            raise RequestError(
                f"{owner} returns {name}, which computes the gradients of a step several times, and with "
                f"trainer.accumulate_grad_batches={context.trainer.accumulate_grad_batches} each time but the first "
                f"would be of the last batch alone. Set trainer.accumulate_grad_batches=1."
            )
    task.trainer.schedules = [_schedule(task, each, owner) for each in schedulers]
    return OwnOptimizers(optimizers, task.trainer.schedules)


def _split(made: Any, owner: str) -> tuple[Sequence[torch.optim.Optimizer], Sequence[Any]]:
    """Return optimizers and schedulers of an optimizer, a dict, a list of either, or lists of each."""
    if isinstance(made, torch.optim.Optimizer):
        return [made], []
    if isinstance(made, Mapping) and "optimizer" in made:
        scheduler = made.get("lr_scheduler")
        if scheduler is not None and not isinstance(scheduler, Mapping):
            scheduler = {"scheduler": scheduler, "monitor": made.get("monitor")}
        return [made["optimizer"]], [] if scheduler is None else [scheduler]
    if isinstance(made, (list, tuple)):
        if len(made) == 2 and isinstance(made[0], (list, tuple)):
            optimizers, schedulers = made
            return list(optimizers), list(schedulers) if isinstance(schedulers, (list, tuple)) else [schedulers]
        pairs = [_split(each, owner) for each in made]
        return [one for first, _ in pairs for one in first], [one for _, second in pairs for one in second]
    given = f"a dict with {', '.join(map(str, made))}" if isinstance(made, Mapping) else type(made).__name__
    raise RequestError(
        f"{owner} returns {given}. Allowed: an optimizer, a dict with optimizer and lr_scheduler, a list of either, or "
        f"a list of optimizers and one of schedulers."
    )


def _schedule(task: LightningTask, given: Any, owner: str) -> Schedule:
    options = dict(given) if isinstance(given, Mapping) else {"scheduler": given}
    if unknown := sorted(options.keys() - _KEYS):
        raise RequestError(f"{owner}: lr_scheduler has no key {', '.join(unknown)}. Keys: {', '.join(sorted(_KEYS))}.")
    if "scheduler" not in options:
        raise RequestError(f"{owner}: lr_scheduler is a dict without 'scheduler'. Give the scheduler under that key.")
    scheduler, interval = options["scheduler"], options.get("interval", "epoch")
    follows = options.get("reduce_on_plateau") or isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
    follows = follows and not task.manual  # else the module gives it the metric
    if interval not in ("step", "epoch"):
        raise RequestError(f"{owner}: interval={interval}. Allowed: step, epoch.")
    if follows and not options.get("monitor"):
        raise RequestError(
            f"{owner}: {type(scheduler).__name__} follows a metric, and there is no 'monitor'. Name one beside the "
            f"scheduler, e.g. {{'scheduler': scheduler, 'monitor': 'val_loss'}}."
        )
    advance = None
    if task.manual:
        advance = _leave
    elif "lr_scheduler_step" in task.hooks.own:

        def advance(scheduler: Any, metric: float | None) -> None:
            task.hooks.of_module("lr_scheduler_step", scheduler, metric)

    return Schedule(
        scheduler,
        interval,
        int(options.get("frequency", 1)),
        options["monitor"] if follows else None,
        bool(options.get("strict", True)),
        advance,
        options.get("name"),
    )


def _leave(scheduler: Any, metric: float | None) -> None:
    """Leave a scheduler to the module, which steps it in manual optimization."""
