"""Several data sets whose batches come together, one of each in a step: as Lightning's ``CombinedLoader`` has them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ddp_recipes._compat.torch_ import tree_unflatten
from ddp_recipes.data.order import FEW, BatchPlan
from ddp_recipes.errors import RequestError


class Sample(NamedTuple):
    """A sample, and the number of the set that it is of."""

    part: int
    value: Any


class Together(Dataset[Any]):
    """Samples of several data sets, numbered one set after the other.

    Numbers of a set beyond its length, as a mixture has them in later epochs, are beyond the length of all.
    """

    def __init__(self, datasets: Sequence[Any]) -> None:
        self.datasets = list(datasets)
        self.starts = [sum(map(len, self.datasets[:number])) for number in range(len(self.datasets))]

    def __len__(self) -> int:
        return sum(map(len, self.datasets))

    def __getitem__(self, index: int) -> Sample:
        rounds, index = divmod(index, len(self))
        part = max(number for number, start in enumerate(self.starts) if start <= index)
        dataset = self.datasets[part]
        return Sample(part, dataset[index - self.starts[part] + rounds * len(dataset)])

    def numbers(self, part: int, samples: Tensor) -> Tensor:
        """Return the numbers of one set's samples."""
        size = len(self.datasets[part])
        return self.starts[part] + samples % size + samples // size * len(self)

    def set_epoch(self, epoch: int) -> None:
        """Tell the sets that take it."""
        for each in self.datasets:
            if callable(told := getattr(each, "set_epoch", None)):
                told(epoch)


@dataclass(frozen=True)
class Collated:
    """Makes a batch of each set's samples, and puts them together as their loaders were.

    Attributes:
        functions: of samples, one a set.
        structure: of the loaders: what ``tree_flatten`` returns of it.
    """

    functions: Sequence[Callable[[list[Any]], Any]]
    structure: Any

    def __call__(self, samples: list[Sample]) -> Any:
        of_sets: list[list[Any]] = [[] for _ in self.functions]
        for part, value in samples:
            of_sets[part].append(value)
        made = [function(own) for function, own in zip(self.functions, of_sets, strict=True)]
        return tree_unflatten(made, self.structure)


@dataclass(frozen=True)
class CombinedPlan(BatchPlan):
    """Global batches of several plans, one of each in a batch. Those that end before the longest begin anew.

    Each time they do is an epoch of theirs, with an order of its own.

    Attributes:
        parts: the plans of the sets.
        dataset: these.
        shortest: whether an epoch ends with the shortest plan.
    """

    parts: tuple[BatchPlan, ...] = field(kw_only=True)
    dataset: Together = field(kw_only=True)
    shortest: bool = field(default=False, kw_only=True)
    uniform = False
    repeats = True  # some begin anew

    @cached_property
    def num_samples(self) -> int:
        """Samples an epoch, each as often as it comes."""
        return self._before(self.num_batches)

    @cached_property
    def num_batches(self) -> int:
        available = (min if self.shortest else max)(part.num_batches for part in self.parts)
        return available if self.max_batches is None else min(self.max_batches, available)

    @cached_property
    def same_sizes(self) -> bool:
        return all(part.same_sizes for part in self.parts)

    @property
    def is_even(self) -> bool:
        return all(part.is_even for part in self.parts)

    def size(self, batch: int, shard: int | None = None) -> int:
        return sum(self._sizes(batch, shard)) if batch < self.num_batches else 0

    def first(self, epoch: int) -> list[int]:
        found: list[int] = torch.cat([self.indices(epoch, 0, shard) for shard in range(self.num_shards)]).tolist()
        return found[:FEW]

    def indices(self, epoch: int, batch: int, shard: int = 0) -> Tensor:
        found, longest = [], max(each.num_batches for each in self.parts)
        for number, part in enumerate(self.parts):
            again, own = divmod(batch, part.num_batches)
            of_part = epoch * -(-longest // part.num_batches) + again
            # Sets of one length would be shuffled alike in an epoch of the same number.
            found.append(self.dataset.numbers(number, part.indices(of_part * len(self.parts) + number, own, shard)))
        return torch.cat(found)

    def positions(self, batch: int, shard: int = 0) -> Tensor:
        start, found = self._before(batch), []
        for part, size in zip(self.parts, self._sizes(batch), strict=True):
            found.append((start + torch.arange(size))[part.places(size, shard)])
            start += size
        return torch.cat(found)

    def _sizes(self, batch: int, shard: int | None = None) -> list[int]:
        return [part.size(batch % part.num_batches, shard) for part in self.parts]

    def _before(self, batch: int) -> int:
        """Return how many samples come before a batch in its epoch."""
        count = 0
        for part in self.parts:
            rounds, rest = divmod(batch, part.num_batches)
            last = part.num_batches - 1
            of_one = last * part.global_batch_size + part.size(last)
            count += rounds * of_one + rest * part.global_batch_size
        return count


def combined(plans: Mapping[str, BatchPlan], dataset: Together, shortest: bool) -> CombinedPlan:
    """Return the plan of several sets, whose batches are dealt to the same shards.

    Args:
        plans: by the names of loaders in messages.

    Raises:
        RequestError: one has no batch, or a batch of which a shard would have no sample.
    """
    for name, plan in plans.items():
        if not plan.num_batches or not plan.is_even:
            raise RequestError(
                f"{name} has {plan.num_samples:,} samples in batches of {plan.global_batch_size:,} over "
                f"{plan.num_shards} shards, each of which needs a sample of every batch, to go with those of the other "
                f"loaders. Choose another batch_size, drop_last=True, or fewer processes."
            )
    parts = tuple(plans.values())
    size = sum(part.global_batch_size for part in parts)
    return CombinedPlan(
        parts[0].order, size, parts[0].num_shards, parts[0].seed, parts=parts, dataset=dataset, shortest=shortest
    )
