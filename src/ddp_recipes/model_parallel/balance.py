"""Where to cut a model so that no stage costs much more than another."""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from torch import nn

from ddp_recipes.errors import RequestError
from ddp_recipes.model_parallel.dry_run import Costs
from ddp_recipes.model_parallel.placement import (
    Conflict,
    has_constants,
    has_state,
    is_cut,
    own_weights,
    ties,
)
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
