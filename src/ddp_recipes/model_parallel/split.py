"""A model over the devices of its replica, by names given or in even stages: no one costs much more than another."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate

import torch
from torch import nn

from ddp_recipes.config.parallelism import Block, Stage
from ddp_recipes.errors import RequestError, nearest
from ddp_recipes.model_parallel.dry_run import Costs, DryRun
from ddp_recipes.model_parallel.placement import (
    Conflict,
    blocks_of,
    connect,
    has_constants,
    has_state,
    is_cut,
    own_weights,
    place,
    put,
    stages_of,
    ties,
)
from ddp_recipes.runtime.tensors import keeping_ties
from ddp_recipes.tasks import Task
from ddp_recipes.tasks.blocks import is_called


def balanced(
    model: nn.Module, stages: int, costs: Costs, dry_run: Callable[[Sequence[str]], object], key: str
) -> list[str]:
    """Return the names at which stages begin, so that the costliest stage costs as little as possible.

    The best cut is run without data; where an operation then mixes stages, the model is not cut there, and the next
    best one is run. Messages name ``key`` as the one that says how many stages there are.
    """
    modules = dict(model.named_modules())
    names = list(modules)
    cost = [0.0, *accumulate(costs.fraction([name]) for name in names)]
    weights = [0, *accumulate(len(own_weights(name, module)) for name, module in modules.items())]
    banned: set[str] = set()  # names at which no stage begins
    reason = ""
    for owners in ties(model):
        held = sorted(names.index(name.rpartition(".")[0]) for name, _ in owners)
        banned.update(names[held[0] + 1 : held[-1] + 1])
        reason = f" {' and '.join(name for name, _ in owners)} are one parameter, and so in one stage."
    whole: set[str] = set()  # modules that are not cut inside
    while True:
        places = _places(model, costs, stages, whole)
        ends = [0, *(names.index(name) for name in places if name in modules and name not in banned), len(names)]
        found = _cut(ends, stages, cost, weights)
        if found is None:
            most = max(1, len({weights[end] for end in ends}) - 1)
            fewer = f"{key}={most}" if most > 1 or key == "model.num_devices" else "a strategy without stages, as ddp"
            raise RequestError(
                f"{key}={stages}, but {type(model).__name__} can be cut into {most} stage(s) at most that "
                f"have parameters.{reason} Use {fewer}."
            )
        starts = [names[end] for end in found]
        try:
            dry_run(starts)
            return starts
        except Conflict as conflict:
            reason = f" At {', '.join(starts)}: {conflict}."
            if conflict.module and is_cut(conflict.module, starts):
                whole.add(conflict.module)
            else:
                first, last = conflict.stages
                banned.update(starts[first:last])


def _cut(ends: Sequence[int], stages: int, cost: Sequence[float], weights: Sequence[int]) -> tuple[int, ...] | None:
    """Cut a chain at some of its ``ends`` into stages with parameters so that the largest cost of one is smallest.

    Costs and numbers of weights are those of the chain before each position. ``None``: it cannot be cut so.
    """
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}  # by end: the largest cost, and the cuts
    for _ in range(stages):
        best = {
            end: min(ways)
            for end in ends
            if (
                ways := [
                    (max(largest, cost[end] - cost[first]), (*cuts, end))
                    for first, (largest, cuts) in best.items()
                    if weights[first] < weights[end]
                ]
            )
        }
    return best[ends[-1]][1][:-1] if ends[-1] in best else None


def _places(model: nn.Module, costs: Costs, stages: int, whole: set[str], prefix: str = "") -> Iterator[str]:
    """Yield where a stage may begin: at children of the model, and inside of those that can be divided.

    Containers can, and any other module that costs more than a fair stage does. What has no weights begins no stage.
    """
    for child_name, child in model.named_children():
        if not has_state(child) or has_constants(child):
            continue
        name = prefix + child_name
        yield name
        contains = not is_called(child) or type(child).forward is nn.Sequential.forward
        if contains or (name not in whole and costs.fraction(costs.inside(name)) > 1 / stages):
            yield from _places(child, costs, stages, whole, f"{name}.")


def split_model(
    task: Task, devices: Sequence[torch.device], names: Sequence[str] | None, dry_run: DryRun
) -> list[Stage]:
    """Put the model of a task on several devices, in stages; what else the task holds goes to the last one.

    Stages begin at ``names``, or are even. A model that cannot be cut so is refused.
    """
    model = task.model
    starts, costs = _chosen(model, len(devices), names, dry_run, dry_run.run, "model.num_devices")
    with keeping_ties(task):
        put(task, devices[-1])
        for child in task.children():
            if child is not model:
                child.to(devices[-1])
        place(model, starts, devices)
    connect(model, starts, devices)
    return _described(model, starts, costs)


def apart(
    model: nn.Module, stages: int, names: Sequence[str] | None, dry_run: DryRun, key: str
) -> tuple[list[str], list[Stage]]:
    """Return where to cut a model into stages that are in processes of their own, and what each of them holds.

    Messages name ``key`` as the one that says how many stages there are.
    """
    starts, costs = _chosen(model, stages, names, dry_run, dry_run.run_apart, key)
    return starts, _described(model, starts, costs)


def _chosen(
    model: nn.Module,
    stages: int,
    names: Sequence[str] | None,
    dry_run: DryRun,
    run: Callable[[Sequence[str]], Costs],
    key: str,
) -> tuple[list[str], Costs]:
    """Return the names if a model can be cut there, or where it is best cut, and what its modules cost."""
    if names is None:
        costs = dry_run.costs
        if dry_run.times is not None:
            costs.time = Counter(dry_run.times())
        return balanced(model, stages, costs, run, key), costs
    _check(model, names)
    try:
        return list(names), run(names)
    except Conflict as conflict:
        first, last = conflict.stages
        inside = conflict.module and is_cut(conflict.module, names)
        there = f"inside {conflict.module}" if inside else f"at {', '.join(names[first:last])}"
        raise RequestError(
            f"model.split=[{', '.join(names)}] cannot be: {conflict}. Let no stage begin {there}, or leave the "
            f"choice to model.split=auto."
        ) from None


def _check(model: nn.Module, names: Sequence[str]) -> None:
    """Refuse names at which stages cannot begin, as far as the names alone tell."""
    given, kind = f"model.split=[{', '.join(names)}]", type(model).__name__
    modules = [name for name, _ in model.named_modules() if name]
    for name in names:
        if name not in modules:
            around = name
            while around not in modules and around:
                around = around.rpartition(".")[0]
            inside = ", ".join(child for child, _ in model.get_submodule(around).named_children())
            raise RequestError(
                f"{given}: {kind} has no {name}.{nearest(name, modules)} {around or kind} has {inside or 'no modules'}."
            )
    if (ordered := sorted(set(names), key=modules.index)) != list(names):
        raise RequestError(
            f"{given}: stages follow the order of the model, each with blocks of its own: model.split="
            f"[{', '.join(ordered)}]."
        )
    stages = stages_of(model, names)
    owning = {stages[module] for name, module in model.named_modules() if own_weights(name, module)}
    for number in range(len(names) + 1):
        if number not in owning:
            begin = f"before {names[0]}" if number == 0 else f"that begins at {names[number - 1]}"
            raise RequestError(
                f"{given}: the stage {begin} has no module that is called and has parameters. Let each stage have one."
            )
    for owners in ties(model):
        held = {stages[module]: name for name, module in owners}
        if len(held) > 1:
            raise RequestError(
                f"{given}: {' and '.join(held.values())} are one parameter, in stages {' and '.join(map(str, held))}. "
                f"Let no stage begin between them."
            )


def _described(model: nn.Module, starts: Sequence[str], costs: Costs) -> list[Stage]:
    stages, time, memory = stages_of(model, starts), sum(costs.time.values()), sum(costs.memory.values())

    def described(name: str) -> Block:
        inside = costs.inside(name)
        return Block(name, _sum(costs.time, inside) / max(1, time), _sum(costs.memory, inside))

    found = []
    for number in range(len(starts) + 1):
        own = {name: module for name, module in model.named_modules() if stages[module] == number}
        blocks = [name for name, block in blocks_of(model, starts).items() if stages[block] == number]
        whole = [name for name in blocks if not is_cut(name, starts)] or blocks
        parameters = {parameter for module in own.values() for parameter in module.parameters(recurse=False)}
        fractions = (_sum(costs.time, own) / time, _sum(costs.memory, own) / memory) if time else (None, None)
        found.append(Stage(tuple(map(described, whole)), sum(each.numel() for each in parameters), *fractions))
    return found


def _sum(costs: Counter[str], names: Iterable[str]) -> int:
    return sum(costs[name] for name in names)
