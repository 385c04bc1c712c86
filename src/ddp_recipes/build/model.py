"""The task with its model, on the devices of a replica."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ddp_recipes._compat.torch_ import apply_to_own
from ddp_recipes.build.devices import Devices
from ddp_recipes.build.instantiate import make, parameters_of
from ddp_recipes.config.extras import extra
from ddp_recipes.config.parallelism import Stage, StrategySettings
from ddp_recipes.config.settings import ModelSettings, TrainerSettings
from ddp_recipes.data.keyed import Form, to_device
from ddp_recipes.data.loader import Loader
from ddp_recipes.errors import RequestError
from ddp_recipes.loggers import Logger
from ddp_recipes.runtime.tensors import keeping_ties
from ddp_recipes.tasks import Task
from ddp_recipes.tasks.task import Modes, outside
from ddp_recipes.training.precision import make_precision, whole_dtype

if TYPE_CHECKING:
    from ddp_recipes.build.deferred import Initial


Times = Callable[[Callable[[], Mapping[str, int]]], Mapping[str, int]]


@dataclass
class BuiltTask:
    """A task and what came of placing its model.

    Attributes:
        stages: of a model that is split; ``starts`` the blocks at which those in other processes begin.
        pictures: what draws the stages.
        initial: values of those of its tensors that have no memory yet, by their names in :meth:`Task.weights`.
        flops: of a sample of training, where it was asked for and could be counted.
        counts_first_step: whether they are to be counted in the first step, for want of another way.
        warnings: for the log.
        made_whole: why it was made with the memory of all tensors, where it was to be made without.
    """

    task: Task
    stages: list[Stage] = field(default_factory=list)
    pictures: list[Callable[[Path, Logger], None]] = field(default_factory=list)
    starts: Sequence[str] = ()
    initial: "Mapping[str, Initial]" = field(default_factory=dict)
    flops: float | None = None
    counts_first_step: bool = False
    warnings: list[str] = field(default_factory=list)
    made_whole: str = "no"


def make_task(
    config: Mapping[str, Any],
    settings: ModelSettings,
    strategy: StrategySettings,
    devices: Devices,
    loader: Loader | None,
    step: str,
    trainer: TrainerSettings,
    times: Times,
) -> BuiltTask:
    """Return the task with its model on the replica's devices, weights drawn from the seed on the CPU.

    Where the strategy's settings say ``deferred``, large tensors stay without memory.

    Args:
        loader: gives a sample to try a split out on; ``None`` where no data are read: then nothing is split.
        step: the task's method to try out.
        trainer: says in what precision the model is, and how it lies in memory.
        times: returns on every rank what a function measures on rank 0.

    Raises:
        RequestError: the model cannot be made or placed so.
    """
    places_itself = _places_itself(config["model"], settings, strategy)
    made = partial(_made, config, **({"devices": devices.own} if places_itself else {}))
    built = _deferred(made) if strategy.deferred and devices.layout is None else BuiltTask(made())
    model = built.task.model
    if settings.num_devices > 1 or settings.activation_checkpointing or strategy.kind != "replicated":
        _refuse_scripted(model, strategy.name)
    if loader is not None and type(built.task).attach is Task.attach and _uninitialized(built.task):
        _initialize(built, loader)
    convert(built.task, whole_dtype(trainer.precision))
    if trainer.channels_last:
        put_channels_last(built.task)
    if trainer.peak_flops is not None and step == "training_step":
        computes_once = not (trainer.compile or settings.activation_checkpointing or strategy.processes_per_replica > 1)
        extra("trainer.peak_flops")(built, loader, in_first_step=computes_once)
    if settings.activation_checkpointing:
        extra("model.activation_checkpointing")(model, settings.activation_checkpointing, bool(trainer.compile))
    if settings.micro_batches > 1:
        extra("model.micro_batches")(model, settings.micro_batches)
    if places_itself:
        built.task.loss.to(devices.own[-1])
    elif (settings.num_devices > 1 or strategy.pipeline is not None) and loader is not None:
        precision = make_precision(trainer.precision, devices.own[0].type)
        extra("model.num_devices")(built, settings, strategy, devices, loader, step, precision, times)
    elif strategy.pipeline is None:  # else nothing is run, and no device need have all stages
        _place(built, devices.own[0])
    if settings.freeze:
        extra("model.freeze")(model, settings.freeze)
    return built


def _place(built: BuiltTask, device: torch.device) -> None:
    """Put a task on a device, but for its tensors that have no memory yet."""
    with keeping_ties(built.task):
        if not built.initial:
            built.task.to(device)
            return
        for module in built.task.modules():
            apply_to_own(module, lambda each: each if each.is_meta else each.to(device))


def _made(config: Mapping[str, Any], **runtime: Any) -> Task:
    """Return the task with its model, where the constructor leaves it."""
    model = make(config["model"], "model", without=[key.name for key in fields(ModelSettings)], **runtime)
    if not isinstance(model, nn.Module):
        target = config["model"].get("_target_")
        raise RequestError(f"model._target_={target} made a {type(model).__name__}, which is no nn.Module.")
    return make(config["task"], "task", model=model)  # type: ignore[no-any-return]


def _places_itself(node: Mapping[str, Any], settings: ModelSettings, strategy: StrategySettings) -> bool:
    """Return whether the model takes ``devices=`` and places itself; refuse it where something else would place it."""
    if "devices" not in parameters_of(str(node.get("_target_")), "model"):
        return False
    if settings.split is not None or strategy.pipeline is not None:
        given, key = f"model.split={settings.split}", "model.split"
        if strategy.pipeline is not None:
            given, key = f"strategy={strategy.name} cuts the model", "strategy"
        raise RequestError(
            f"{given}, but {node['_target_']} takes `devices` and places itself. Leave out {key}, or choose the model "
            f"without '_mp'."
        )
    return True


def _deferred(made: Callable[[], Task]) -> BuiltTask:
    """Return the task whose large tensors have no memory yet."""
    from ddp_recipes.build.deferred import materialize, without_memory

    task, found, warnings = without_memory(made)
    initial = {outside(name): value for name, value in found.items()}
    if initial and type(task).attach is not Task.attach:  # which may look at weights
        materialize(task, initial, {}, torch.device("cpu"))
        initial = {}
    task.deferred = bool(initial)
    return BuiltTask(task, initial=initial, warnings=warnings, made_whole="".join(warnings) or "no")


def _refuse_scripted(model: nn.Module, strategy: str) -> None:
    """Refuse TorchScript where modules of the model are to run otherwise than by themselves."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise RequestError(
                f"{name or 'The model'} is a ScriptModule, whose blocks take no hooks: it goes neither with "
                f"model.num_devices nor model.activation_checkpointing, nor with a strategy that has a part of the "
                f"model on each rank (here strategy={strategy}). Give the module that was scripted, or leave these out."
            )


def _uninitialized(task: Task) -> list[str]:
    """Return the names of parameters and buffers whose shapes follow from a first batch, as of ``nn.LazyLinear``."""
    return [outside(name) for name, each in (*task.named_parameters(), *task.named_buffers()) if is_lazy(each)]


def _initialize(built: BuiltTask, loader: Loader) -> None:
    """Have lazy modules learn their shapes of a batch, in evaluation, and draw their values next to all others.

    Raises:
        RequestError: the model fails, or does not run them.
    """
    task, reason = built.task, "the model does not run them in evaluation"
    if built.initial:
        from ddp_recipes.build.deferred import materialize

        materialize(task, built.initial, {}, torch.device("cpu"))
        built.initial, task.deferred, built.made_whole = {}, False, "its lazy modules run on a batch"
    batch = to_device(loader.sample(max(1, loader.plan.size(0, 0))), torch.device("cpu"))
    if loader.form.dtype is not None:  # which the model is given later
        batch = Form(torch.get_default_dtype()).of(batch)
    modes = Modes(task)
    task.eval()
    try:
        with torch.no_grad():
            task.predict_step(batch)
    except Exception as error:  # noqa: BLE001 - of any kind; the model's
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    modes.restore()
    refuse_lazy(task, f"A pass on a batch of the data did not do: {reason}")


def refuse_lazy(task: Task, reason: str) -> None:
    """Refuse lazy modules that have no shapes.

    Raises:
        RequestError: names them, and says why they have none.
    """
    if names := _uninitialized(task):
        listed = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
        raise RequestError(
            f"{listed} of the model get their shapes in a first forward pass, which ranks have to know before. "
            f"{reason}. Call the model on a batch in its constructor, or give the sizes, as nn.Linear has them."
        )


def convert(task: Task, dtype: torch.dtype | None) -> None:
    """Give all floating-point parameters and buffers a dtype, unless that is ``None``: values are drawn, then rounded.

    Raises:
        RequestError: a tensor is complex.
    """
    if dtype is None:
        return
    for name, tensor in (*task.named_parameters(), *task.named_buffers()):
        if tensor.is_complex():
            raise RequestError(
                f"{outside(name)} is of {tensor.dtype}, and trainer.precision makes all numbers {dtype}, which are "
                f"real. Use 32-true or bf16-mixed, or keep it as two numbers (torch.view_as_real)."
            )
    task.to(dtype)


def refuse_sparse(task: Task, alone: bool) -> None:
    """Refuse tensors of the model in a layout that neither checkpoints nor exchanges between ranks and shards have.

    Args:
        alone: whether there is one of each, so that nothing is exchanged.

    Raises:
        RequestError: names it.
    """
    saved = task.weights().keys()
    for name, tensor in (*task.named_parameters(), *task.named_buffers()):
        if tensor.layout != torch.strided and (not alone or outside(name) in saved):
            other = ", or register it as a buffer with persistent=False" if alone else ""
            raise RequestError(
                f"{outside(name)} of the model has the layout {tensor.layout}. Checkpoints, and what ranks or "
                f"shards exchange, are of dense tensors. Have its indices and its values as two buffers, of which "
                f"forward makes it (torch.sparse_coo_tensor), or have it dense{other}."
            )


def put_channels_last(task: Task) -> None:
    """Have weights ``[n, c, h, w]`` lie in memory as ``[n, h, w, c]``; optimizers' states lie as they do."""
    for tensor in (*task.parameters(), *task.buffers()):
        if tensor.dim() == 4:
            tensor.data = tensor.data.contiguous(memory_format=torch.channels_last)
