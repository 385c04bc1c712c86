"""What the loop works with, optimizers among it, and what shows of it, made once all ranks are ready."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from inspect import signature, unwrap
from typing import Any

import torch

from ddp_recipes._compat.torch_ import record_collectives
from ddp_recipes.build.instantiate import make, parameters_of
from ddp_recipes.build.recipe import Recipe
from ddp_recipes.callbacks import Callback
from ddp_recipes.config.extras import extra, extra_or
from ddp_recipes.config.settings import seconds
from ddp_recipes.devices import GPU_BACKEND, HOST_BACKEND, bound_to
from ddp_recipes.errors import RequestError, not_one_of
from ddp_recipes.runtime.process import connections, disconnect, loading
from ddp_recipes.runtime.seeding import Generators
from ddp_recipes.strategies import Strategy, exchanges
from ddp_recipes.tasks import Schedule, Task
from ddp_recipes.training.cadence import StopController
from ddp_recipes.training.clock import make_clock
from ddp_recipes.training.guards import NonFiniteGuard
from ddp_recipes.training.hooks import PythonState, RunHooks, Trained
from ddp_recipes.training.precision import make_precision
from ddp_recipes.training.state import Run
from ddp_recipes.training.update import needs_closure, update


def join(recipe: Recipe) -> None:
    """Join the other ranks. A collective."""
    launcher = recipe.request.launcher
    timeout = timedelta(seconds=launcher.timeout_s)
    if recipe.devices.backend == HOST_BACKEND and recipe.world.nnodes > 1:
        from ddp_recipes.runtime.connectivity import check_ways

        check_ways(recipe.control)
    replaces = launcher.replace_ranks > 0
    if recipe.devices.backend.startswith(GPU_BACKEND):
        exchanges.leave_failures_to_us()
    recipe.strategy.bound = bound_to(recipe.devices.backend, recipe.devices.own)
    exchanges.hold(set())
    # NCCL connects to its own sockets for as long as a group lives, also to leave it: they are its alone.
    connects_once = recipe.devices.backend.endswith(HOST_BACKEND)
    guard: Any = partial(nullcontext, set())
    if connects_once:
        guard = extra_or("socket guard", guard)
    messages = recipe.control.messages
    are_theirs = None if messages is None else messages.opens_none()
    before = connections()
    with guard() as recipe.control.unexpected:
        if messages is not None:
            messages.exited = recipe.control.watcher.exited
        recipe.strategy.setup(recipe.world, messages, recipe.devices.backend, timeout, launcher.init_method)
    opened = connections() - before
    # One to the store that was opened meanwhile would be missed, as another rank, once a next one takes its place.
    recipe.control.connections = opened if connects_once and (are_theirs is None or are_theirs()) else set()
    if recipe.request.strategy.needs_all(recipe.world.world_size):
        exchanges.hold(recipe.control.connections, least=0 if replaces else exchanges.LARGE)
    if recipe.strategy.silent:
        own, abort = recipe.devices.own, recipe.strategy.abort
        recipe.strategy.exchanges = exchanges.Exchanges(own, launcher.timeout_s, abort, settles=replaces)
        recipe.strategy.exchanges.recorders = record_collectives()
    recipe.control.watcher.when_lost(partial(cut_off, recipe))  # else they may be waited for
    recipe.strategy.exchanges.synchronize()


def cut_off(recipe: Recipe) -> None:
    """End what is under way with the other ranks, from any thread."""
    disconnect(recipe.control.connections)
    recipe.strategy.exchanges.end()


def make_stop_controller(recipe: Recipe) -> StopController:
    """Return what decides on stopping before the end."""
    max_time, moves = seconds(recipe.trainer.max_time), recipe.control.watcher.moves
    return StopController(recipe.world, recipe.strategy.sum, recipe.device, max_time, moves)


def make_run(recipe: Recipe, stop_controller: StopController, strategy: Strategy | None = None) -> Run:
    """Return what the loop works with, restored from the checkpoint if there is one. A collective.

    The optimizer is made of what the strategy leaves this rank of the model.

    Args:
        strategy: another one than the recipe's.

    Raises:
        RequestError: optimizer or scheduler cannot be made.
    """
    strategy, devices, task = strategy or recipe.strategy, recipe.devices.own, recipe.task
    recipe.load_weights(strategy)
    with loading():  # an optimizer that is not torch's own may bring its compiler
        optimizers, schedules = strategy.make_optimizers(task, partial(_optimizers_and_schedules, recipe))
    fixed_shards = recipe.request.strategy.fixed_shards
    by_torch = all(str(unwrap(type(each).step).__module__).startswith("torch.optim.") for each in optimizers)
    draws, seed = fixed_shards is not None or not by_torch, recipe.request.run.seed  # others' steps may draw
    every = min(recipe.trainer.log_every_n_steps, max(1, recipe.length.total_steps or recipe.trainer.log_every_n_steps))
    run = Run(
        world=recipe.world,
        task=task,
        module=strategy.wrap(task, devices),
        update=task.update or update,
        strategy=strategy,
        devices=devices,
        optimizers=optimizers,
        schedules=schedules,
        precision=make_precision(recipe.trainer.precision, recipe.device.type, strategy.settings.kind == "replicated"),
        train=recipe.loaders["train"],
        val=recipe.val,
        trainer=replace(recipe.trainer, log_every_n_steps=every),
        checkpoint=recipe.checkpoint,
        monitor=recipe.monitor,
        auto_monitor=recipe.request.checkpoint.auto_monitor,
        seed=seed,
        generators=Generators(seed, strategy.draws_on(devices), recipe.world.rank, drawn=draws),
        shards=fixed_shards,
        stop_controller=stop_controller,
        guard=NonFiniteGuard(recipe.world, strategy.sum, recipe.device),
        clock=make_clock(devices[-1]),
        callbacks={**task.callbacks(), **_switches(task, optimizers), **recipe.callbacks},
        hooks=_watching(recipe) if recipe.world.is_main else [],
    )
    if recipe.built.flops is not None or recipe.built.counts_first_step:
        extra("operations of a run")(run, recipe)
    if strategy.settings.exchanges(recipe.world):
        run.hooks = [*run.hooks, Trained(run)]
    for callback in run.callbacks.values():
        callback.run = run
    if recipe.state is not None:
        from ddp_recipes.build.resume import restore

        recipe.warnings.extend(restore(run, recipe.state, recipe.job.goes_on))
        recipe.forget_state()
    task.enter_training()
    recipe.warnings.extend(_in_eval_mode(task))
    return run


def _watching(recipe: Recipe) -> list[RunHooks]:
    """Return what looks at steps in order to log what it finds, as rank 0 does."""
    return [PythonState(), *([extra("what is compiled in a step")()] if recipe.trainer.compile else [])]


def _optimizers_and_schedules(recipe: Recipe) -> tuple[Sequence[torch.optim.Optimizer], Sequence[Schedule]]:
    """Return them, for the parameters that the task has now."""
    job, task, steps, epochs = recipe.job, recipe.task, recipe.length.total_steps, recipe.length.total_epochs
    made = make_optimizers_and_schedules(job.config, task, recipe.may_fuse, steps, epochs, job.overrides)
    recipe.warnings.extend(_untrained(task, made[0]))
    return made


def _switches(task: Task, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Callback]:
    """Return what evaluates with other weights than it trains with, where the config's optimizer does so."""
    if not has_modes(optimizers[0]) or task.configure_optimizers() is not None:
        return {}
    return {"optimizer_modes": extra("optimizers with an eval mode")(optimizers)}


def _in_eval_mode(task: Task) -> Iterator[str]:
    """Yield a warning of modules that do not train."""
    if frozen := [name.removeprefix("model.") for name, module in task.named_modules() if not module.training]:
        listed = f"{', '.join(frozen[:3])}{', …' if len(frozen) > 3 else ''}"
        yield (
            f"In eval mode as training begins, and so they stay: {listed} ({len(frozen)} of the modules). If that is "
            f"not meant, call their train() in the model's __init__."
        )


def _untrained(task: Task, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[str]:
    """Yield a warning where no parameter of a task is trained, as of a ``configure_optimizers`` that returns none."""
    trained = {id(each) for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]}
    if trained.isdisjoint(map(id, task.parameters())):
        yield (
            f"No optimizer has a parameter of {type(task.model).__name__}, so training changes none. If that is not "
            f"meant, have configure_optimizers return an optimizer of self.parameters()."
        )


# --- optimizers and schedules


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
    if next(task.parameters(), None) is None:
        raise RequestError(
            f"{type(task.model).__name__} has no parameters, so there is nothing to train. Its layers have to be "
            f"attributes of it, or lie in an nn.ModuleList or nn.ModuleDict: those in a list or dict are not seen."
        )
    node, without = config["optimizer"], ["groups", "layer_decay"]
    fused: dict[str, Any] = {"fused": True} if may_fuse and _has_fused(node, task) else {}
    taken = [*parameters_of(str(node["_target_"]), "optimizer")] if "_target_" in node else []
    if of_model := bool(taken) and taken[0].startswith("model"):
        without = [key for key in without if key not in taken or node.get(key) is None]  # timm has a layer_decay
        others = {*task.parameters()} - {*task.model.parameters()}
        if others or any(node.get(key) for key in without):
            raise RequestError(
                f"optimizer._target_={node['_target_']} takes the model, so it takes neither optimizer.groups and "
                f"optimizer.layer_decay nor the {len(others)} parameters that are in the task beside the model. Leave "
                f"them out, or choose an optimizer of parameters."
            )
    made = partial(make, node, "optimizer", without=without, **fused)
    if of_model:
        optimizer: Any = made(task.model)
    elif node.get("groups") or node.get("layer_decay") is not None:
        optimizer = extra("optimizer.groups")(made, node, task)
    else:
        optimizer = made(task.parameters())
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

    def length(key: str) -> int:
        if found := steps if interval == "step" else epochs:
            return found
        if steps:
            raise RequestError(
                f"{key} follows the number of epochs, and how many steps a stream's epoch has shows at its end. Set "
                f"scheduler.interval=step, which goes by trainer.max_steps={steps}, or {key}."
            )
        raise RequestError(
            f"{key} follows the length of the run, which is not known: set it, or set trainer.max_epochs (of a stream "
            f"trainer.max_steps) to at least 1."
        )

    scheduler = _make_scheduler(node, "scheduler", optimizer, length, config["optimizer"].get("lr"))
    follows = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
    _check_step(scheduler, follows)
    if node.get("monitor") and not follows:
        raise RequestError(
            f"scheduler.monitor={node['monitor']} is for ReduceLROnPlateau: {type(scheduler).__name__} follows no "
            f"metric. Leave it out."
        )
    if not follows:
        return Schedule(scheduler, interval)
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])  # as torch's other schedulers do, for a resume to tell it from lr
    monitor = node.get("monitor") or "val/loss"
    validated = interval == "epoch" and monitor.startswith("val")
    return Schedule(scheduler, interval, config["trainer"]["check_val_every_n_epoch"] if validated else 1, monitor)


def _make_scheduler(
    node: Mapping[str, Any],
    section: str,
    optimizer: torch.optim.Optimizer,
    length: Callable[[str], int],
    lr: float | None,
    first: int = 0,
) -> Any:
    """Return a scheduler, with those that it is made of, as torch's ``SequentialLR`` is.

    Args:
        section: the node's dotted name, for messages.
        length: returns the run's, in ticks, for a key that follows it.
        lr: of the optimizer, to which others of its groups are in proportion.
        first: the tick at which it begins.
    """
    for name in ("step_size", "T_max", "T_0", "total_steps"):
        if isinstance(node.get(name), int) and node[name] < 1:  # torch divides by it, in training
            raise RequestError(f"{section}.{name}={node[name]} is not allowed. Allowed: a whole number at least 1.")
    of_run: dict[str, Any] = {
        name: max(1, length(f"{section}.{name}") - first)
        for name in ("T_max", "total_steps")
        if name in node and node[name] is None and node.get("epochs") is None  # of OneCycleLR, in its place
    }
    highest = node.get("max_lr")
    if len(optimizer.param_groups) > 1 and isinstance(highest, (int, float)) and lr:
        of_run["max_lr"] = [highest * group["lr"] / lr for group in optimizer.param_groups]  # or all would be alike
    nested, given = node.get("schedulers"), [optimizer]
    if isinstance(nested, list) and all(isinstance(each, Mapping) and "_target_" in each for each in nested):
        milestones = [tick for tick in node.get("milestones") or () if isinstance(tick, int)]
        given, of_run["optimizer"] = [], optimizer  # which does not come first in all of these
        of_run["schedulers"] = [
            _make_scheduler(each, f"{section}.schedulers.{number}", optimizer, length, lr, first + tick)
            for number, (each, tick) in enumerate(zip(nested, [0, *milestones, *len(nested) * [0]], strict=False))
        ]
    return make(node, section, *given, without=["interval", "monitor", *of_run], **of_run)


def _check_step(scheduler: Any, follows: bool) -> None:
    """Refuse a scheduler that is none of torch's kind, as timm's are, before an epoch has been trained."""
    try:
        signature(scheduler.step).bind(*([0.0] if follows else []))
    except (TypeError, AttributeError):
        raise RequestError(
            f"scheduler makes a {type(scheduler).__name__}, which has no step() without arguments, as those of torch "
            f"have. Choose one of torch.optim.lr_scheduler, or a function of the optimizer that gives one."
        ) from None
