"""``check=equivalence``: does a strategy compute what one process computes? Where not, it names step and tensor.

Or a number that a task or its model keeps outside of tensors, if it counts what a strategy does more often.
"""

import dataclasses
import logging
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_recipes._compat.torch_ import Dropout, local
from ddp_recipes.build.recipe import Recipe, make_recipe
from ddp_recipes.build.run import make_run, make_stop_controller
from ddp_recipes.errors import RequestError, RunFailed
from ddp_recipes.output import Output
from ddp_recipes.runtime.control import Control
from ddp_recipes.runtime.tensors import rows_here
from ddp_recipes.runtime.world import World
from ddp_recipes.strategies.base import batch_norms
from ddp_recipes.tasks.metrics import is_stateful
from ddp_recipes.training.loop import advance
from ddp_recipes.training.state import Run
from ddp_recipes.training.update import clip, forward_backward, needs_closure

Numbers = dict[str, float]

FEWEST = 3  # steps after which what has grown in each of them counts something
_DEEPEST, _LONGEST = 3, 1000  # of containers that are looked into
_OF_TORCH = vars(nn.Module()).keys()
_OTHERS = ("torch", "ddp_recipes", "builtins")  # packages in whose classes and modules no user counts


class Counters:
    """The numbers of a task after each step.

    Class attributes and globals are shared by all tasks of a process: in :meth:`apart` this one's are in place.
    """

    def __init__(self, task: nn.Module) -> None:
        self._task = task
        classes = {kind for each in task.modules() for kind in _own_classes(each)}
        self._owners: dict[str, Any] = {f"{kind.__module__}.{kind.__qualname__}": kind for kind in classes}
        self._owners |= {kind.__module__: sys.modules.get(kind.__module__) for kind in classes}
        self._shared = self._in_place()
        self._series: list[Numbers] = [{**numbers_of(task), **self._shared}]

    def _in_place(self) -> Numbers:
        return {
            f"{owner}.{name}": value
            for owner, place in self._owners.items()
            for name, value in vars(place or object).items()
            if type(value) in (int, float)
        }

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Let this task have its own of what tasks share."""
        others = self._in_place()
        self._put(self._shared)
        try:
            yield
        finally:
            self._shared = self._in_place()
            self._put(others)

    def _put(self, numbers: Numbers) -> None:
        for name, value in numbers.items():
            owner, _, attribute = name.rpartition(".")
            setattr(self._owners[owner], attribute, value)

    def note(self) -> None:
        """Note the numbers after a step."""
        self._series.append({**numbers_of(self._task), **self._shared})

    def differing(self, other: "Counters") -> dict[str, tuple[float, float]]:
        """Return the numbers that count in both tasks, and come to others: by name, here and there."""
        mine, its = self._counting(), other._counting()
        return {
            name: (mine[name], its[name])
            for name in mine
            if name in its and not math.isclose(mine[name], its[name], rel_tol=1e-6)
        }

    def _counting(self) -> Numbers:
        """Return the last values of those that count."""
        last = self._series[-1]
        return {name: last[name] for name in last if counts([each[name] for each in self._series if name in each])}


def counts(values: Sequence[float]) -> bool:
    """Whether numbers follow from how many there were before: whole ones that always grow, or in even steps.

    What a module notes of a batch, such as its size or its loss, does not.
    """
    if len(values) <= FEWEST:
        return False
    pairs = [*pairwise(values)]
    if all(type(value) is int for value in values):
        return all(one < other for one, other in pairs) or all(one > other for one, other in pairs)
    differences = [other - one for one, other in pairs]
    ratios = [other / one if one else math.nan for one, other in pairs]
    return any(
        each[0] != neutral and all(math.isclose(one, each[0], rel_tol=1e-6) for one in each)
        for each, neutral in ((differences, 0.0), (ratios, 1.0))
    )


def numbers_of(task: nn.Module) -> Numbers:
    """Return the numbers among the attributes of modules, and in containers there, by their dotted names."""
    return {
        name: number
        for prefix, module in task.named_modules()
        if not is_stateful(module)  # a metric counts what it measured
        for owner in _own_classes(module)[:1]
        for attribute, value in vars(module).items()
        if attribute not in _OF_TORCH
        for name, number in _inside(value, f"{prefix}.{attribute}".removeprefix("."), owner.__module__, 0)
    }


def _own_classes(module: nn.Module) -> list[type]:
    """Return the classes of a module that are neither torch's nor ours; FSDP2 derives one of its own from them."""
    return [kind for kind in type(module).__mro__ if kind.__module__.partition(".")[0] not in _OTHERS]


def _inside(value: Any, name: str, module: str, depth: int) -> Iterator[tuple[str, float]]:
    if type(value) in (int, float):
        yield name.removeprefix("model."), value
    elif isinstance(value, Tensor):
        if value.dim() == 0 and not value.is_meta and not value.is_complex():
            yield name.removeprefix("model."), value.item()
    elif depth < _DEEPEST:
        for key, inside in _items(value, module):
            yield from _inside(inside, f"{name}.{key}", module, depth + 1)


def _items(value: Any, module: str) -> Sequence[tuple[Any, Any]]:
    """Return what is in a container, or in an object of the code that the model is of."""
    own = type(value).__module__ == module and not isinstance(value, nn.Module)
    if isinstance(value, Mapping):
        found = [*value.items()]
    elif isinstance(value, (list, tuple)):
        found = [*enumerate(value)]
    elif (own or dataclasses.is_dataclass(value)) and hasattr(value, "__dict__") and not isinstance(value, type):
        found = [*vars(value).items()]
    else:
        return ()
    return found if len(found) <= _LONGEST else ()


log = logging.getLogger(__name__)

KINDS = ("gradient", "parameter", "buffer")
TOLERANCE = {
    "32-true": 1e-5,
    "bf16-mixed": 3e-2,
    "16-mixed": 3e-2,
    "bf16-true": 1e-1,
    "64-true": 1e-14,
}  # over five times what rounding was seen to do

Tensors = dict[str, Tensor]


def equivalence(recipe: Recipe, output: Output) -> None:
    """Train with the recipe's strategy and, beside it on every rank, with ``strategy=single``; compare at each step.

    A rank compares what it has of the model. Gradients are compared once they are reduced, before they are clipped;
    then the reference gets the same ones, so that rounding does not add up. Parameters and buffers are compared after
    the optimizer's step. Dropout is off in both: its masks differ between ranks. Numbers outside of tensors must
    not count what one of both does more often, as forward passes.

    Raises:
        RequestError: no step is left to compare, or a module takes its steps itself.
        RunFailed: something differs by more than ``check_tolerance``; the same on every rank.
    """
    settings, reference = recipe.request.run, alone(recipe)
    pair = [make_run(each, make_stop_controller(each)) for each in (recipe, reference)]
    refuse_own_steps(pair[0])
    start, end = pair[0].cursor.step, recipe.length.total_steps
    steps = settings.check_steps if end is None else min(settings.check_steps, end - start)
    if steps < 1:
        raise RequestError(
            f"check=equivalence has no step to compare: at step {start} a limit of trainer.* is reached."
        )
    output.open(None)
    (without, _) = [switch_dropout_off(run.task) for run in pair]
    if without:
        log.info("Dropout is off for the check, in %s: its masks differ from rank to rank.", ", ".join(without))
    tolerance = settings.check_tolerance
    if tolerance is None:
        rounds = recipe.request.strategy.rounds_gradients
        tolerance = max(TOLERANCE[recipe.trainer.precision], TOLERANCE["bf16-mixed"] if rounds else 0.0)
    comparison = Comparison(recipe.world.rank, tolerance)
    counters = [Counters(run.task) for run in pair]
    ours, its = (train(run) for run in pair)
    group = dist.new_subgroups(1)[0] if dist.is_initialized() else None
    for number in range(2 * steps):
        with counters[0].apart():
            mine = next(ours)
        with one_process(group), counters[1].apart():
            single = next(its)
        if "parameter" in mine:
            for each in counters:
                each.note()
        for kind in mine:
            here = {name: rows_here(each, mine[kind][name]) for name, each in single[kind].items()}
            ours_here = {name: local(each).to(here[name].device) for name, each in mine[kind].items()}
            comparison.add(start + number // 2 + 1, kind, ours_here, here)
        if "gradient" in mine:
            for one, other in zip(pair[0].task.parameters(), pair[1].task.parameters(), strict=True):
                other.grad = None if one.grad is None else _whole(one.grad).to(other.device, copy=True)
    counted = counters[0].differing(counters[1])
    gathered = recipe.strategy.gather((comparison.largest, comparison.first, counted))
    largest, first, counted = recipe.control.of_main("differences", lambda: of_all_ranks(gathered or ()))
    output.metrics = {f"check/{kind}": size for kind, size in largest.items()}
    if first is not None:
        raise RunFailed(describe(recipe, tolerance, Difference(*first)), rank=0)
    if counted:
        raise RunFailed(describe_counters(recipe, steps, counted), rank=0)
    name = recipe.request.strategy.name
    log.info("strategy=%s does what strategy=single does: %d steps, check_tolerance %g.", name, steps, tolerance)


def _whole(gradient: Tensor) -> Tensor:
    """Return a gradient put together, on every rank, if its rows are sharded. A collective.

    ``DTensor.full_tensor`` needs a group with backends for functional collectives, which one written in Python has not.
    """
    mesh = getattr(gradient, "device_mesh", None)
    if mesh is None:
        return gradient
    group, own = mesh.get_group(mesh.ndim - 1), local(gradient)
    padded = own.new_zeros(-(-len(gradient) // group.size()), *own.shape[1:])
    padded[: len(own)] = own
    joined = own.new_empty(group.size() * len(padded), *own.shape[1:])
    dist.all_gather([*torch.split(joined, len(padded))], padded, group=group)
    return joined[: len(gradient)]


def refuse_own_steps(run: Run) -> None:
    """Refuse steps whose gradients nobody else sees.

    Raises:
        RequestError: the module takes its steps itself, or the optimizer takes several backward passes.
    """
    if not run.task.accumulates:
        raise RequestError(
            f"check=equivalence compares gradients before the optimizer's step, and {type(run.task.model).__name__} "
            f"takes its optimizer steps itself (automatic_optimization=False). Leave check out."
        )
    if needs_closure(run.optimizer):
        raise RequestError(
            f"check=equivalence compares the gradients of one backward pass a batch, and "
            f"{type(run.optimizer).__name__} takes several, by a closure. Leave check out."
        )


def alone(recipe: Recipe) -> Recipe:
    """Return this recipe for one process: ``strategy=single`` on whole global batches, on this rank's device."""
    config = dict(recipe.job.config)
    config["strategy"] = {"_target_": "ddp_recipes.strategies.Single", "processes": 1}
    config["data"] = {**config["data"], "global_batch_size": recipe.loaders["train"].plan.global_batch_size}
    world = World(local_rank=recipe.world.local_rank)
    return make_recipe(replace(recipe.job, config=config), world, Control(world, None, recipe.control.timeout_s))


@contextmanager
def one_process(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Make ``group``, of this process alone, torch's default one: a model may divide by its size."""
    ranks = dist.group.WORLD
    dist.group.WORLD = group
    try:
        yield
    finally:
        dist.group.WORLD = ranks


def train(run: Run) -> Iterator[dict[str, Tensors]]:
    """Train without an end; yield the gradients of each step, then the parameters and buffers after it."""
    parameters = {name.removeprefix("model."): parameter for name, parameter in run.task.named_parameters()}
    run.train.moves = True  # for no hook of the task does
    while True:
        epoch = run.cursor.epoch
        batches = run.train.batches(epoch, run.cursor.batch, run.trainer.accumulate_grad_batches)
        while run.cursor.epoch == epoch:
            _, samples, _ = forward_backward(run, batches)
            yield {
                "gradient": {
                    name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                    for name, parameter in parameters.items()
                }
            }
            clip(run, measured=False)
            run.precision.step(run.optimizer)
            run.optimizer.zero_grad()
            advance(run, samples)
            buffers = {name.removeprefix("model."): buffer for name, buffer in run.task.named_buffers()}
            yield {"parameter": {name: each.detach() for name, each in parameters.items()}, "buffer": buffers}


def switch_dropout_off(module: nn.Module) -> list[str]:
    """Set the dropout of torch's modules to 0; return the names of those that had some."""
    dropping = []
    for name, each in module.named_modules():
        key = "p" if isinstance(each, Dropout) else "dropout"
        if (key == "p" or isinstance(each, (nn.MultiheadAttention, nn.RNNBase))) and getattr(each, key) > 0:
            setattr(each, key, 0.0)
            dropping.append(name.removeprefix("model."))
    return dropping


class Difference(NamedTuple):
    """The first tensor of a rank that differs: by how much, and by what factors all of its kind and it are too large.

    ``size`` is relative to the largest tensor of its kind; a factor is NaN where there is no such number.
    """

    step: int
    rank: int
    kind: str
    name: str
    size: float
    factor_of_all: float
    factor: float


class Comparison:
    """The largest difference of each kind so far, and the first one that is more than the tolerance.

    Tensors differ by the largest difference of two numbers in them, relative to the largest floating-point number in
    all tensors of their kind: what comes of rounding is small beside that, also in a tensor that should be zero.
    """

    def __init__(self, rank: int, tolerance: float) -> None:
        self.rank, self.tolerance = rank, tolerance
        self.largest = dict.fromkeys(KINDS, 0.0)
        self.first: Difference | None = None

    def add(self, step: int, kind: str, mine: Tensors, single: Tensors) -> None:
        """Compare the tensors of a kind."""
        rounded = [each for each in single.values() if each.is_floating_point() or each.is_complex()]
        scale = max(map(_largest, rounded), default=0.0) or 1.0
        sizes = {name: difference(mine[name], each, scale) for name, each in single.items()}
        self.largest[kind] = max(self.largest[kind], *sizes.values(), 0.0)
        name = next((name for name, size in sizes.items() if size > self.tolerance), None)
        if self.first is None and name is not None:
            of_all, of_one = (
                factor([mine[each] for each in names], [single[each] for each in names], self.tolerance)
                for names in (list(single), [name])
            )
            self.first = Difference(step, self.rank, kind, name, sizes[name], of_all, of_one)


Counted = dict[str, tuple[float, float]]  # names of numbers to what they come to here, and in one process
Found = tuple[dict[str, float], Difference | None, Counted]


def of_all_ranks(gathered: Sequence[Found]) -> Found:
    """Return the largest differences of all ranks, the first one, and what is counted otherwise on any."""
    largest = {kind: max(each[kind] for each, _, _ in gathered) for kind in KINDS}
    firsts = [Difference(*first) for _, first, _ in gathered if first is not None]
    counted = {name: pair for _, _, of_rank in reversed(gathered) for name, pair in of_rank.items()}
    return largest, min(firsts, key=lambda each: (each.step, KINDS.index(each.kind), each.rank), default=None), counted


def difference(one: Tensor, other: Tensor, scale: float) -> float:
    """Return the largest difference of two numbers, relative to ``scale``."""
    if one.numel() == 0:
        return 0.0
    one, other = _numbers(one), _numbers(other)
    same = (one == other) | (one.isnan() & other.isnan())
    off = torch.where(same, 0.0, (one - other).abs()).nan_to_num(nan=math.inf).max().item()
    return off / scale


def factor(ones: Sequence[Tensor], others: Sequence[Tensor], tolerance: float) -> float:
    """Return the number that the others are multiplied with to give the ones, or NaN if there is no such number."""
    one, other = (torch.cat([_numbers(each).flatten() for each in some]) for some in (ones, others))
    found = ((one @ other) / (other @ other)).item()
    off = (one - found * other).abs().max().item()
    return found if off <= tolerance * abs(found) * _largest(other) else math.nan


def _numbers(tensor: Tensor) -> Tensor:
    """Return a tensor's numbers in double precision, on the host: not every device has that."""
    tensor = tensor.detach().cpu()
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).double()


def _largest(tensor: Tensor) -> float:
    tensor = _numbers(tensor)
    finite = tensor[tensor.isfinite()].abs()
    return finite.max().item() if finite.numel() else 0.0


def describe(recipe: Recipe, tolerance: float, first: Difference) -> str:
    """Say what differs first, and what may be the cause."""
    kind = first.kind
    text = (
        f"strategy={recipe.request.strategy.name} does not do what strategy=single does. The first difference is at "
        f"step {first.step}, on rank {first.rank}: the {kind} {first.name} is off by {first.size:.2g} of the largest "
        f"{kind} (check_tolerance {tolerance:g})."
    )
    if not math.isnan(first.factor_of_all) and kind == "gradient":
        times = f"{first.factor_of_all:.4g} times"
        text += f" All gradients are {times} those of one process: is a loss scaled twice, or not at all?"
    elif not math.isnan(first.factor):
        text += f" It is {first.factor:.4g} times that of one process."
    elif norms := [name.removeprefix("model.") for name in batch_norms(recipe.task)]:
        text += (
            f" The model has batch norm ({', '.join(norms[:2])}{', …' if len(norms) > 2 else ''}): each replica takes "
            f"its statistics from its own samples."
        )
        if remedy := recipe.request.strategy.batch_norm_remedy("cpu"):
            text += f" {remedy}"
    elif kind == "buffer":
        text += " Does each rank change it by its own samples?"
    return text


def describe_counters(recipe: Recipe, steps: int, counted: Counted) -> str:
    """Say what a model counts that does not come to the same."""
    listed = ", ".join(f"{name} is {mine:g}, {single:g} there" for name, (mine, single) in [*counted.items()][:4])
    return (
        f"strategy={recipe.request.strategy.name} does not do what strategy=single does: the model counts, and after "
        f"{steps} steps {listed}{', …' if len(counted) > 4 else ''}. How many forward passes a step takes and how many "
        f"samples are in one differ, so what depends on such a number comes at another time. Have it follow the "
        f"optimizer steps: a callback's on_step has their number, as Task.global_step has."
    )
