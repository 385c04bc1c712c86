"""Numbers that a task and its model keep outside of tensors: whether they count what a strategy does more often."""

import dataclasses
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from ddp_recipes.tasks.metrics import is_stateful

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
