"""A model over the devices of its replica, by names given or in even parts."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ddp_recipes.errors import RequestError, nearest
from ddp_recipes.model_parallel.balance import balanced
from ddp_recipes.model_parallel.dry_run import Costs, Rehearsal
from ddp_recipes.model_parallel.placement import Conflict, blocks_of, connect, is_cut, place, put, stages_of, ties
from ddp_recipes.tasks import Task


@dataclass(frozen=True)
class Block:
    """A module that runs in one stage.

    Attributes:
        time: its share of a step.
        memory: bytes of weights, gradients, one number of the optimizer's for each, and activations.
    """

    name: str
    time: float
    memory: int


@dataclass(frozen=True)
class Stage:
    """What one device of a replica holds.

    Attributes:
        first: its first block; ``last`` likewise.
        parameters: how many numbers.
        time: its share of a step, ``None`` where the model could not be rehearsed; ``memory`` likewise.
        blocks: what it holds, in the order of the model.
    """

    first: str
    last: str
    parameters: int
    time: float | None
    memory: float | None
    blocks: tuple[Block, ...] = ()

    def __str__(self) -> str:
        blocks = self.first if self.first == self.last else f"{self.first} to {self.last}"
        shares = "" if self.time is None else f", {self.time:.0%} of the time, {self.memory:.0%} of the memory"
        return f"{blocks}: {self.parameters:,} parameters{shares}"


def split_model(
    task: Task, devices: Sequence[torch.device], names: Sequence[str] | None, rehearsal: Rehearsal
) -> list[Stage]:
    """Put the model of a task on several devices, in stages; what else the task holds goes to the last one.

    Args:
        names: the modules at which stages begin; ``None`` for even parts.

    Raises:
        RequestError: the model cannot be cut so; says where it can.
    """
    model = task.model
    starts, costs = _chosen(model, len(devices), names, rehearsal, rehearsal.run, "model.num_devices")
    put(task, devices[-1])
    for part in task.children():
        if part is not model:
            part.to(devices[-1])
    place(model, starts, devices)
    connect(model, starts, devices)
    return _described(model, starts, costs)


def apart(
    model: nn.Module, stages: int, names: Sequence[str] | None, rehearsal: Rehearsal, key: str
) -> tuple[list[str], list[Stage]]:
    """Return where to cut a model into stages that are in processes of their own, and what each of them holds.

    Args:
        key: what says how many stages there are, for messages.

    Raises:
        RequestError: the model cannot be cut so; says where it can.
    """
    starts, costs = _chosen(model, stages, names, rehearsal, rehearsal.run_apart, key)
    return starts, _described(model, starts, costs)


def _chosen(
    model: nn.Module,
    stages: int,
    names: Sequence[str] | None,
    rehearsal: Rehearsal,
    rehearse: Callable[[Sequence[str]], Costs],
    key: str,
) -> tuple[list[str], Costs]:
    """Return the names if a model can be cut there, or where it is best cut, and what its modules cost."""
    if names is None:
        costs = rehearsal.run()
        if rehearsal.times is not None:
            costs.time = Counter(rehearsal.times())
        return balanced(model, stages, costs, rehearse, key), costs
    starts = _checked(model, names)
    try:
        return starts, rehearse(starts)
    except Conflict as conflict:
        first, last = conflict.stages
        inside = conflict.module and is_cut(conflict.module, starts)
        there = f"inside {conflict.module}" if inside else f"at {', '.join(starts[first:last])}"
        raise RequestError(
            f"model.split=[{', '.join(starts)}] cannot be: {conflict}. Let no stage begin {there}, or leave the "
            f"choice to model.split=auto."
        ) from None


def _checked(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Return the names if stages can begin there, as far as the names alone tell.

    Raises:
        RequestError: they cannot.
    """
    given, kind = f"model.split=[{', '.join(names)}]", type(model).__name__
    there = [name for name, _ in model.named_modules() if name]
    for name in names:
        if name not in there:
            around = name
            while around not in there and around:
                around = around.rpartition(".")[0]
            inside = ", ".join(child for child, _ in model.get_submodule(around).named_children())
            raise RequestError(
                f"{given}: {kind} has no {name}.{nearest(name, there)} {around or kind} has {inside or 'no modules'}."
            )
    if (ordered := sorted(set(names), key=there.index)) != list(names):
        raise RequestError(
            f"{given}: stages follow the order of the model, each with blocks of its own: model.split="
            f"[{', '.join(ordered)}]."
        )
    stages = stages_of(model, names)
    for number in range(len(names) + 1):
        if not any(list(module.parameters(recurse=False)) for module, stage in stages.items() if stage == number):
            begin = f"before {names[0]}" if number == 0 else f"that begins at {names[number - 1]}"
            raise RequestError(f"{given}: the stage {begin} has no parameters. Let each stage have some.")
    for owners in ties(model):
        held = {stages[module]: name for name, module in owners}
        if len(held) > 1:
            raise RequestError(
                f"{given}: {' and '.join(held.values())} are one parameter, in stages {' and '.join(map(str, held))}. "
                f"Let no stage begin between them."
            )
    return list(names)


def _described(model: nn.Module, starts: Sequence[str], costs: Costs) -> list[Stage]:
    stages = stages_of(model, starts)
    described = []
    for number in range(len(starts) + 1):
        blocks = [name for name, block in blocks_of(model, starts).items() if stages[block] == number]
        ends = [name for name in blocks if not is_cut(name, starts)] or blocks
        names = [name for name, module in model.named_modules() if stages[module] == number]
        modules = [module for module in stages if stages[module] == number]
        total = {id(p): p.numel() for module in modules for p in module.parameters(recurse=False)}
        time, memory = (
            sum(each[name] for name in names) / sum(each.values()) if costs.time else None
            for each in (costs.time, costs.memory)
        )
        costly = {name: costs.total(name) for name in ends}
        whole = max(1, sum(costs.time.values()))
        parts = tuple(Block(name, own / whole, taken) for name, (own, taken) in costly.items())
        described.append(Stage(ends[0], ends[-1], sum(total.values()), time, memory, parts))
    return described
