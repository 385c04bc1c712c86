"""Optimizer and learning-rate scheduler."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ddp_recipes.build.instantiate import make, parameters_of
from ddp_recipes.errors import RequestError, not_one_of
from ddp_recipes.tasks import Schedule, Task
from ddp_recipes.training.update import needs_closure


def make_optimizer(config: Mapping[str, Any], task: Task, may_fuse: bool) -> torch.optim.Optimizer:
    """Return a new optimizer for a task: the module's own, where it has one, else the config's.

    Args:
        may_fuse: whether it may update all parameters in one kernel, where the config leaves that open.
    """
    own = task.configure_optimizers()
    return _of_config(config, task, may_fuse) if own is None else own.optimizers[0]


def make_optimizers_and_schedules(
    config: Mapping[str, Any],
    task: Task,
    may_fuse: bool,
    steps: int | None,
    epochs: int | None,
    overrides: Sequence[str] = (),
) -> tuple[Sequence[torch.optim.Optimizer], Sequence[Schedule]]:
    """Return optimizers and schedules: the module's own, where it is one of Lightning's, else the config's, one each.

    Args:
        may_fuse: as of :func:`make_optimizer`.
        steps: optimizer steps of the whole run, in so many ``epochs``; ``None`` if only time limits it.
        overrides: of the command line.

    Raises:
        RequestError: one of them cannot be made, or an override is for one that the module brings itself.
    """
    own = task.configure_optimizers()
    brings = [] if own is None else ["optimizer", "scheduler"] if own.schedules else ["optimizer"]
    for override in overrides:
        if re.match(rf"[+~]*({'|'.join(brings) or '$'})\b", override):
            raise RequestError(
                f"{override}: {type(task.model).__name__} brings its own {' and '.join(brings)}, by "
                f"configure_optimizers, so this would change nothing. Leave it out, and set the module's own arguments "
                f"(model.*)."
            )
    if own is not None and (config["optimizer"].get("groups") or config["optimizer"].get("layer_decay") is not None):
        raise RequestError(
            f"optimizer.groups and optimizer.layer_decay are for the config's optimizer, and "
            f"{type(task.model).__name__} brings its own, by configure_optimizers. Leave them out."
        )
    optimizers = [_of_config(config, task, may_fuse)] if own is None else own.optimizers
    if own is None and needs_closure(optimizers[0]):
        raise RequestError(
            f"optimizer._target_={config['optimizer'].get('_target_')} computes the gradients of a step several times, "
            f"by a closure. Choose another one, or task=lightning with a module whose configure_optimizers makes it."
        )
    if own is not None and own.schedules:
        return optimizers, own.schedules
    return optimizers, [_make_schedule(config, optimizers[0], steps, epochs)]


def has_modes(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer leaves other weights in the model to evaluate than to train, as schedule-free ones do."""
    return all(callable(getattr(optimizer, mode, None)) for mode in ("train", "eval"))


def _of_config(config: Mapping[str, Any], task: Task, may_fuse: bool) -> torch.optim.Optimizer:
    """Return the config's optimizer, of one kernel for all parameters where it may be.

    What takes a model first, as timm's ``create_optimizer_v2``, gets the model.
    """
    node, without = config["optimizer"], ["groups", "layer_decay"]
    fused: dict[str, Any] = {"fused": True} if may_fuse and _has_fused(node, task) else {}
    taken = [*parameters_of(str(node["_target_"]), "optimizer")] if "_target_" in node else []
    if taken and taken[0].startswith("model"):
        without = [key for key in without if key not in taken or node.get(key) is None]  # timm has a layer_decay
        others = {*task.parameters()} - {*task.model.parameters()}
        if others or any(node.get(key) for key in without):
            raise RequestError(
                f"optimizer._target_={node['_target_']} takes the model, so it takes neither optimizer.groups and "
                f"optimizer.layer_decay nor the {len(others)} parameters that are in the task beside the model. Leave "
                f"them out, or choose an optimizer of parameters."
            )
        optimizer: Any = make(node, "optimizer", task.model, without=without, **fused)
    elif not node.get("groups") and node.get("layer_decay") is None:
        optimizer = make(node, "optimizer", task.parameters(), without=without, **fused)
    else:
        from ddp_recipes.build.parameters import check_options, grouped

        optimizer = make(node, "optimizer", grouped(node, task), without=without, **fused)
        check_options(optimizer.param_groups, optimizer.defaults)
    if has_modes(optimizer):
        optimizer.train()
    return optimizer  # type: ignore[no-any-return]


def _has_fused(node: Mapping[str, Any], task: Task) -> bool:
    """Whether the optimizer is one of torch's that can update all parameters in one kernel, and the config lets it.

    Not Adagrad on a GPU: in torch 2.10 its fused step is for the CPU alone.
    """
    on_cpu = all(parameter.is_cpu for parameter in task.parameters())
    return (
        node.get("fused") is None
        and not node.get("foreach")
        and str(node.get("_target_")).startswith("torch.optim.")
        and "fused" in parameters_of(node["_target_"], "optimizer")
        and (on_cpu or node["_target_"].rpartition(".")[2] != "Adagrad")
        and all(parameter.is_floating_point() for parameter in task.parameters())
        and not node.get("dampening")  # which the first step leaves out, for parameters that get a gradient later, too
        and not any(getattr(module, "sparse", False) for module in task.modules())
    )


def _make_schedule(
    config: Mapping[str, Any], optimizer: torch.optim.Optimizer, steps: int | None, epochs: int | None
) -> Schedule:
    """Return the scheduler; a length that its yaml leaves null is that of the run, in ticks."""
    node = config["scheduler"]
    interval = node.get("interval", "epoch")
    if interval not in ("step", "epoch"):
        raise not_one_of("scheduler.interval", interval, ("step", "epoch"))
    for name in ("step_size", "T_max", "T_0", "total_steps"):
        if isinstance(node.get(name), int) and node[name] < 1:  # torch divides by it, in training
            raise RequestError(f"scheduler.{name}={node[name]} is not allowed. Allowed: a whole number at least 1.")
    lengths = [name for name in ("T_max", "total_steps") if name in node and node[name] is None]
    if lengths and steps and not epochs and interval == "epoch":
        raise RequestError(
            f"scheduler.{lengths[0]} follows the number of epochs, and how many steps a stream's epoch has shows at "
            f"its end. Set scheduler.interval=step, which goes by trainer.max_steps={steps}, or scheduler.{lengths[0]}."
        )
    if lengths and not steps:
        raise RequestError(
            f"scheduler.{lengths[0]} follows the length of the run, which is not known: set it, or set "
            f"trainer.max_epochs (of a stream trainer.max_steps) to at least 1."
        )
    of_run: dict[str, Any] = dict.fromkeys(lengths, steps if interval == "step" else epochs)
    highest, lr = node.get("max_lr"), config["optimizer"].get("lr")
    if len(optimizer.param_groups) > 1 and isinstance(highest, (int, float)) and lr:
        of_run["max_lr"] = [highest * group["lr"] / lr for group in optimizer.param_groups]  # or all would be alike
    scheduler = make(node, "scheduler", optimizer, without=["interval", "monitor", *of_run], **of_run)
    follows = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
    if node.get("monitor") and not follows:
        raise RequestError(
            f"scheduler.monitor={node['monitor']} is for ReduceLROnPlateau: {type(scheduler).__name__} follows no "
            f"metric. Leave it out."
        )
    return Schedule(scheduler, interval, monitor=node.get("monitor") or "val/loss" if follows else None)
