"""Samplers and batch samplers of a user's own, as torch's ``DataLoader`` takes them: asked for whole epochs."""

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddp_recipes.data.order import BatchPlan, Indices
from ddp_recipes.errors import RequestError, RunFailed
from ddp_recipes.runtime.seeding import key, seeded

_KEPT = 2  # epochs
_MOST = 1000  # times as many as a data set has samples: a sampler without a length may go on for ever


class Epochs:
    """What a sampler gives in each epoch: the same on whichever rank asks, and after a resume.

    An epoch is asked for as a whole. What the sampler draws from torch, ``random`` or NumPy follows from (seed, epoch);
    ``set_epoch(epoch)`` is called where it, or the ``sampler`` whose samples it puts in batches, has that. One without
    it may count its own epochs: a copy of it is iterated from the first epoch on.

    Args:
        sampler: gives numbers of samples, or lists of them.
        name: of the sampler in messages.

    Raises:
        RequestError: it gives nothing, or something else each time.
    """

    def __init__(self, sampler: Iterable[Any], dataset: Any, seed: int, name: str) -> None:
        self.sampler, self.dataset, self.seed, self.name = sampler, dataset, seed, name
        self._found: dict[int, list[Any]] = {}
        self._next = 0
        self._copied()
        first, again = self(0), self._epoch(0)
        if first != again:
            raise RequestError(
                f"{self} gives another order each time it begins, though what torch, random and NumPy draw is seeded: "
                f"ranks, and a resumed run, could not tell which samples are theirs. Seed what it draws from, by the "
                f"epoch that its set_epoch(epoch) is told."
            )
        if not first:
            raise RequestError(f"{self} gives no sample. Each call of its __iter__ has to begin an epoch.")

    def __str__(self) -> str:
        return f"{self.name}, a {type(self.sampler).__name__},"

    def __call__(self, epoch: int) -> list[Any]:
        """Return what it gives in an epoch."""
        if epoch not in self._found:
            while len(self._found) >= _KEPT:
                del self._found[next(iter(self._found))]
            self._found[epoch] = self._epoch(epoch)
        return self._found[epoch]

    def _epoch(self, epoch: int) -> list[Any]:
        """Go through the sampler up to an epoch, on from the last one where that is before it."""
        tells = bool(_told(self.sampler))
        if epoch < self._next or tells:
            self._copied()
            self._next = epoch if tells else 0
        found: list[Any] = []
        while self._next <= epoch:
            with seeded(key(self.seed, self._next)):
                for each in _told(self._copy):
                    each.set_epoch(self._next)
                found = self._given()
            self._next += 1
        return found

    def _copied(self) -> None:
        try:
            self._copy: Any = deepcopy(self.sampler, {id(self.dataset): self.dataset})
        except Exception as error:
            raise RequestError(
                f"{self} cannot be copied, and each epoch is that of a copy that is begun anew: {error}"
            ) from error
        self._next = 0

    def _given(self) -> list[Any]:
        most = len(self._copy) if hasattr(self._copy, "__len__") else _MOST * (1 + len(self.dataset))
        found = list(islice(self._copy, most + 1))
        if len(found) > most:
            raise RequestError(f"{self} gives more than {most:,} in an epoch. It has to end, where its length says.")
        if any(isinstance(each, (list, tuple, Tensor, np.ndarray)) and np.ndim(each) for each in found[:1]):
            return [self._checked(each) for each in found]
        return self._checked(found)

    def _checked(self, given: Any) -> list[int]:
        """Return the numbers of samples as plain ones."""
        try:
            numbers = np.asarray(given, dtype=None if len(given) else np.int64)
            fits = numbers.ndim == 1 and numbers.dtype.kind in "iu"
        except (TypeError, ValueError):
            fits = False
        if not fits:
            raise RequestError(f"{self} gives {str(given)[:60]}. Allowed: numbers of samples, or lists of them.")
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < len(self.dataset):
            raise RequestError(
                f"{self} gives samples from {numbers.min()} to {numbers.max()}, and its data set has "
                f"{len(self.dataset)}, from 0 on."
            )
        found: list[int] = numbers.tolist()
        return found


def _told(sampler: Any) -> list[Any]:
    """Return what of a sampler is told the epoch: itself, and the one that it puts in batches."""
    parts = (sampler, getattr(sampler, "sampler", None))
    return [each for each in parts if callable(getattr(each, "set_epoch", None))]


class Sampled:
    """The order of a sampler: any samples, each as often as it gives them.

    Raises:
        RequestError: it gives batches.
    """

    repeats = True

    def __init__(self, epochs: Epochs) -> None:
        self.epochs, self._size = epochs, len(epochs(0))
        if any(isinstance(each, list) for each in epochs(0)):
            raise RequestError(f"{epochs} gives lists: it is a batch sampler. Set data.batch_sampler.")

    def __len__(self) -> int:
        return self._size

    def samples(self, epoch: int, positions: Indices) -> Indices:
        found = self.epochs(epoch)
        if len(found) != self._size:
            raise RunFailed(_other_length(self.epochs, len(found), self._size, epoch))
        return np.array(found, dtype=np.uint64)[positions]


@dataclass(frozen=True)
class BatchedPlan(BatchPlan):
    """The global batches of a batch sampler, each cut into shards; their sizes are those of the epoch that was entered.

    Attributes:
        given: the batches of an epoch.
        repeating: whether each epoch is the first one again.
    """

    given: Epochs = field(kw_only=True)
    repeating: bool = False
    uniform = False
    repeats = True  # nobody knows
    epoch, starts = 0, [0]

    def enter(self, epoch: int) -> None:
        """Have sizes be those of an epoch.

        Raises:
            RunFailed: it has more or fewer batches than the first one.
        """
        if len(found := self._batches(epoch)) != len(first := self._batches(0)):
            raise RunFailed(_other_length(self.given, len(found), len(first), epoch))
        object.__setattr__(self, "epoch", epoch)
        object.__setattr__(self, "starts", [0, *accumulate(map(len, found))])

    @cached_property
    def num_samples(self) -> int:
        """Samples of the first epoch."""
        return sum(map(len, self._batches(0)))

    @cached_property
    def num_batches(self) -> int:
        available = len(self._batches(0))
        return available if self.max_batches is None else min(self.max_batches, available)

    @property
    def same_sizes(self) -> bool:
        return self.num_shards == 1

    @property
    def is_even(self) -> bool:
        return self.num_shards == 1

    def size(self, batch: int, shard: int | None = None) -> int:
        batches = self._batches(self.epoch)
        total = len(batches[batch]) if batch < len(batches) else 0
        return total if shard is None else self._size_of_shard(total, shard)

    def indices(self, epoch: int, batch: int, shard: int = 0) -> Tensor:
        return self._shard(torch.tensor(self._batches(epoch)[batch], dtype=torch.int64), shard)

    def positions(self, batch: int, shard: int = 0) -> Tensor:
        start = self.starts[batch]
        return self._shard(torch.arange(start, start + self.size(batch)), shard)

    def _batches(self, epoch: int) -> list[list[int]]:
        return self.given(0 if self.repeating else epoch)


def sampled(sampler: Iterable[Any], dataset: Any, seed: int) -> Sampled:
    """Return the order of a sampler."""
    return Sampled(Epochs(sampler, dataset, seed, "The sampler"))


def batched(sampler: Iterable[Any], dataset: Any, plan: BatchPlan, repeating: bool) -> BatchedPlan:
    """Return the plan of a batch sampler, cut into shards as another one is.

    Raises:
        RequestError: it gives numbers, or batches without a sample.
    """
    epochs = Epochs(sampler, dataset, plan.seed, "The batch sampler")
    first = epochs(0)
    if not all(isinstance(each, list) and each for each in first):
        raise RequestError(
            f"{epochs} gives {first[0] if isinstance(first[0], int) else 'a batch without a sample'}. Allowed: lists "
            f"of numbers, each a global batch. A sampler that gives one after the other is data.sampler."
        )
    size = max(map(len, first))
    return BatchedPlan(
        plan.order, size, plan.num_shards, plan.seed, False, plan.sharding, given=epochs, repeating=repeating
    )


def _other_length(epochs: Epochs, found: int, first: int, epoch: int) -> str:
    return (
        f"{epochs} gives {found:,} in epoch {epoch}, and gave {first:,} in the first one. Steps, schedules and resumes "
        f"count by an epoch's length: give as many in each."
    )
