"""What a module logs by ``self.log``: of a step, and of an epoch."""

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ddp_recipes._compat.torchmetrics_ import batch_value
from ddp_recipes.errors import RequestError
from ddp_recipes.tasks import Surroundings
from ddp_recipes.tasks.task import is_stateful
from ddp_recipes.training.metrics import agree_on_lists

_REDUCTIONS = ("mean", "sum", "min", "max")


@dataclass
class Entry:
    """A name that was logged.

    Attributes:
        reduction: of the values of an epoch to one.
        metric: of torchmetrics, computed at the end of an epoch in place of the values.
    """

    on_step: bool
    on_epoch: bool
    reduction: str
    metric: Any = None

    def __post_init__(self) -> None:
        self.of_step, self.of_epoch = Total(self.reduction), Total(self.reduction)


class Total:
    """The mean, sum, least or greatest of values, over this rank's steps and over all ranks."""

    def __init__(self, reduction: str) -> None:
        self.reduction = reduction
        self.value: Tensor | None = None  # of this rank; a mean's is the sum of value times weight
        self.weight = 0.0

    def add(self, value: Tensor, weight: float) -> None:
        """Take one more value."""
        value = value.detach().double()
        self.merge(value * weight if self.reduction == "mean" else value, weight)

    def result(self) -> float | None:
        """Return what it came to; ``None`` where there was no value."""
        if self.value is None:
            return None
        return self.value.item() / (self.weight if self.reduction == "mean" else 1)

    def merge(self, value: Tensor, weight: float) -> None:
        """Take the value of another total."""
        if self.value is None:
            self.value = value
        elif self.reduction in ("mean", "sum"):
            self.value = self.value + value
        else:
            self.value = (torch.minimum if self.reduction == "min" else torch.maximum)(self.value, value)
        self.weight += weight


def reduced(totals: Iterable[Total], around: Surroundings) -> list[Total]:
    """Return them over all ranks, which have the same totals in the same order. A collective; it waits once.

    A rank without a value does not count.
    """
    totals = list(totals)
    if not totals:
        return []
    world, device = around.world, around.devices[-1]
    zero = torch.zeros((), dtype=torch.float64, device=device)
    mine = [torch.stack([zero if t.value is None else t.value.to(device), zero + t.weight]) for t in totals]
    every = torch.zeros(1, world.world_size, len(mine), 2, dtype=torch.float64, device=device)
    every[0, world.rank] = torch.stack(mine)  # each rank has a place of its own, so the sum is what all have
    found = []
    for each, pairs in zip(totals, around.sum(every).transpose(0, 1).cpu(), strict=True):
        total = Total(each.reduction)
        for value, weight in pairs:
            if weight > 0:
                total.merge(value, weight.item())
        found.append(total)
    return found


class Log:
    """What was logged since it was last read, by the names that Lightning gives it."""

    def __init__(self, owner: str) -> None:
        self.owner = owner  # the module's class, for messages
        self.entries: dict[str, Entry] = {}
        self.names: set[str] = set()  # all that ever came up
        self.unlogged: set[str] = set()  # those that loggers do not get

    def add(
        self,
        name: str,
        value: Any,
        size: float,
        *,
        on_step: bool,
        on_epoch: bool,
        reduce_fx: Any = "mean",
        logger: bool = True,
    ) -> None:
        """Take a value that counts for ``size`` samples.

        Raises:
            RequestError: it is not a scalar, or is to be reduced in a way that is not there.
        """
        reduction = {torch.mean: "mean", torch.sum: "sum", torch.min: "min", torch.max: "max"}.get(reduce_fx, reduce_fx)
        if reduction not in _REDUCTIONS:
            raise RequestError(
                f"{self.owner} logs {name} with reduce_fx={reduce_fx}, which cannot be done over ranks. Allowed: "
                f"{', '.join(_REDUCTIONS)}."
            )
        is_metric = is_stateful(value)
        entry = self._entry(name, on_step, on_epoch, reduction, logger)
        if is_metric:
            entry.metric = value
            number = batch_value(value) if on_step else None
        else:
            number = torch.as_tensor(value)
            if number.numel() != 1:
                raise RequestError(
                    f"{self.owner} logs {name} of shape {list(number.shape)}. Allowed: a single number, or a metric of "
                    f"torchmetrics."
                )
            number = number.reshape(())
        if number is None:
            return
        if on_step:
            entry.of_step.add(number, size)
        if on_epoch and not is_metric:
            entry.of_epoch.add(number, size)

    def steps(self, around: Surroundings) -> dict[str, float]:
        """Return and forget the values of the latest steps. A collective."""
        chosen = {
            f"{name}_step" if entry.on_epoch else name: entry for name, entry in self.entries.items() if entry.on_step
        }
        values = [total.result() for total in reduced([e.of_step for e in chosen.values()], around)]
        for entry in chosen.values():
            entry.of_step = Total(entry.reduction)
        return {name: value for name, value in zip(chosen, values, strict=True) if value is not None}

    def epoch(self, around: Surroundings) -> dict[str, float]:
        """Return the values of the epoch, then forget it and reset its metrics. A collective."""
        chosen = {
            f"{name}_epoch" if entry.on_step else name: entry for name, entry in self.entries.items() if entry.on_epoch
        }
        plain = {name: entry for name, entry in chosen.items() if entry.metric is None}
        values = [total.result() for total in reduced([e.of_epoch for e in plain.values()], around)]
        found = {name: value for name, value in zip(plain, values, strict=True) if value is not None}
        agree_on_lists(entry.metric for entry in chosen.values() if entry.metric is not None)
        for name, entry in chosen.items():
            if entry.metric is not None:
                with warnings.catch_warnings():  # of a metric without an update: a rank without a sample is no mistake
                    warnings.filterwarnings("ignore", "The ``compute`` method", UserWarning)
                    found[name] = float(entry.metric.compute())
                entry.metric.reset()
        self.entries = {}
        return {name: found[name] for name in chosen if name in found}

    def state(self, around: Surroundings) -> dict[str, Any]:
        """Return what the epoch came to so far, over all ranks. A collective."""
        plain = {name: each for name, each in self.entries.items() if each.on_epoch and each.metric is None}
        totals = reduced([entry.of_epoch for entry in plain.values()], around)
        return {
            name: [entry.on_step, entry.reduction, name not in self.unlogged, total.value, total.weight]
            for (name, entry), total in zip(plain.items(), totals, strict=True)
        }

    def load_state(self, state: Mapping[str, Any], first: bool) -> None:
        """Restore it: the values on the ``first`` rank alone, for they will be added up again."""
        for name, (on_step, reduction, logger, value, weight) in state.items():
            entry = self._entry(name, on_step, True, reduction, logger)
            if first and value is not None:
                entry.of_epoch.merge(value, weight)

    def _entry(self, name: str, on_step: bool, on_epoch: bool, reduction: str, logger: bool) -> Entry:
        if name not in self.entries:
            self.entries[name] = Entry(on_step, on_epoch, reduction)
            names = {name, f"{name}_step", f"{name}_epoch"}
            self.names |= names
            self.unlogged |= set() if logger else names
        return self.entries[name]

    def forget_steps(self) -> None:
        """Forget the values of steps that are not logged."""
        for entry in self.entries.values():
            entry.of_step = Total(entry.reduction)
