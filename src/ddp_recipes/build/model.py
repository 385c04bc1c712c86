"""The task with its model, on the devices of a replica."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import torch

from ddp_recipes.build.deferred import Initial, without_memory
from ddp_recipes.build.devices import Devices
from ddp_recipes.build.filling import fill
from ddp_recipes.build.instantiate import make, parameters_of
from ddp_recipes.build.parameters import freeze
from ddp_recipes.build.recomputation import recompute
from ddp_recipes.config.parallelism import StrategySettings
from ddp_recipes.config.settings import ModelSettings
from ddp_recipes.data.loader import Loader
from ddp_recipes.errors import RequestError
from ddp_recipes.model_parallel import DryRun, Stage, apart, in_micro_batches, split_model, timed
from ddp_recipes.tasks import Task
from ddp_recipes.tasks.task import outside
from ddp_recipes.training.precision import Precision

Times = Callable[[Callable[[], Mapping[str, int]]], Mapping[str, int]]


@dataclass
class BuiltTask:
    """A task and what came of placing its model.

    Attributes:
        stages: of a model that is split; ``starts`` the blocks at which those in other processes begin.
        initial: values of those of its tensors that have no memory yet, by their names in :meth:`Task.weights`.
        warnings: for the log.
    """

    task: Task
    stages: list[Stage] = field(default_factory=list)
    starts: Sequence[str] = ()
    initial: Mapping[str, Initial] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def make_task(
    config: Mapping[str, Any],
    settings: ModelSettings,
    strategy: StrategySettings,
    devices: Devices,
    loader: Loader | None,
    step: str,
    precision: Precision,
    times: Times,
    compiled: bool,
) -> BuiltTask:
    """Return the task with its model on the replica's devices, weights drawn from the seed on the CPU.

    Where the strategy's settings say ``deferred``, large tensors stay without memory.

    Args:
        loader: gives a sample to try a split out on; ``None`` where no data are read: then nothing is split.
        step: the task's method to try out.
        times: returns on every rank what a function measures on rank 0.
        compiled: whether to compile the model, where it is to run.

    Raises:
        RequestError: the model cannot be made or placed so.
    """
    node, pipeline = config["model"], strategy.pipeline
    target = str(node.get("_target_"))
    places_itself = "devices" in parameters_of(target, "model")
    if places_itself and (settings.split is not None or pipeline is not None):
        given, key = f"model.split={settings.split}", "model.split"
        if pipeline is not None:
            given, key = f"strategy={strategy.name} cuts the model", "strategy"
        raise RequestError(
            f"{given}, but {node['_target_']} takes `devices` and places itself. Leave out {key}, or choose the model "
            f"without '_mp'."
        )
    runtime = {"devices": devices.own} if places_itself else {}

    def made() -> Task:
        model = make(node, "model", without=[key.name for key in fields(ModelSettings)], **runtime)
        if not isinstance(model, torch.nn.Module):
            raise RequestError(f"model._target_={target} made a {type(model).__name__}, which is no nn.Module.")
        return make(config["task"], "task", model=model)  # type: ignore[no-any-return]

    deferred = strategy.deferred and devices.layout is None
    task, initial, warnings = without_memory(made) if deferred else (made(), {}, [])
    if initial and type(task).attach is not Task.attach:  # which may look at weights
        fill(task, {outside(name): value for name, value in initial.items()}, {}, torch.device("cpu"))
        initial = {}
    task.deferred = bool(initial)
    model = task.model
    built = BuiltTask(task, initial={outside(name): value for name, value in initial.items()}, warnings=warnings)
    if settings.activation_checkpointing:
        recompute(model, settings.activation_checkpointing)
    if settings.micro_batches > 1:
        in_micro_batches(model, settings.micro_batches)
    if places_itself:
        built.task.loss.to(devices.own[-1])
    elif (settings.num_devices > 1 or pipeline is not None) and loader is not None:
        dry_run = DryRun(built.task, step, loader.sample(), loader.plan.size(0, 0))
        _split(built, settings, strategy, devices, dry_run, precision, times)
    elif not initial:
        built.task.to(devices.own[0])
    if settings.freeze:
        freeze(model, settings.freeze)
    if compiled and devices.layout is None:
        model.compile()
    return built


def _split(
    built: BuiltTask,
    settings: ModelSettings,
    strategy: StrategySettings,
    devices: Devices,
    dry_run: DryRun,
    precision: Precision,
    times: Times,
) -> None:
    """Cut the model into stages, on the devices of a process or in several processes."""
    names = [str(name) for name in settings.split] if isinstance(settings.split, list) else None
    if settings.split == "timed" and devices.layout is None:
        dry_run.times = partial(times, partial(timed, dry_run, devices.own[0], precision.forward))
    elif settings.split == "timed":
        built.warnings.append(
            "model.split=timed: in a dry run there is no device to time on, so stages are even as with auto."
        )
    if (pipeline := strategy.pipeline) is not None:  # the task stays on the CPU: no device may have room for all of it
        built.starts, built.stages = apart(built.task.model, pipeline.stages, names, dry_run, pipeline.stages_key)
    else:
        built.stages = split_model(built.task, devices.own, names, dry_run)
    if dry_run.failure is not None:
        what = "The split could not be tried out" if pipeline is None else "What blocks cost could not be found out"
        built.warnings.append(f"{what} before training: {dry_run.failure}")
