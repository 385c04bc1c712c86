"""Several sets as one, each as often as its weight says: ``data=mixture``."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from numbers import Real
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from ddp_recipes.config.keys import Count, require
from ddp_recipes.data.loader import size_of
from ddp_recipes.data.order import BatchPlan, Indices, Order, Sequential, Shuffled, order_of, permute
from ddp_recipes.errors import RequestError
from ddp_recipes.runtime.seeding import key, keys
from ddp_recipes.streams.order import Windowed
from ddp_recipes.streams.reader import span

_LONGEST = 1 << 40  # places of a block


@dataclass(frozen=True, eq=False)
class Mixed:
    """Samples of several sets, in each block of places as many of each as its share; nothing is stored.

    Each set is gone through in its own order, from one of its epochs to the next, and where an epoch of the mixture
    ends the next one goes on. Which places of a block a set has, is a keyed permutation: the number of a set's samples
    before a place follows from the place alone.

    Attributes:
        orders: of the sets; samples are numbered through them.
        shares: of each set in a block of places.
        num_samples: places of an epoch.
        by_epoch: of each set, whether its samples are others in another of its epochs. Their numbers then have that
            epoch times the number of all samples added.
    """

    orders: tuple[Order, ...]
    shares: tuple[int, ...]
    num_samples: int
    seed: int
    by_epoch: tuple[bool, ...] = ()
    repeats = True

    def __len__(self) -> int:
        return self.num_samples

    def samples(self, epoch: int, positions: Indices) -> Indices:
        """Return the sample at each place of an epoch."""
        source, own = self.places(epoch, positions)
        found = np.empty_like(own)
        first, total = 0, sum(map(len, self.orders))
        for number, order in enumerate(self.orders):
            here, size = source == number, np.uint64(len(order))
            epochs, places = own[here] // size, own[here] % size
            samples = np.uint64(first) + _of_epochs(order, epochs, places)
            found[here] = samples + epochs * np.uint64(total) if self.by_epoch and self.by_epoch[number] else samples
            first += len(order)
        return found

    def places(self, epoch: int, positions: Indices) -> tuple[Indices, Indices]:
        """Return of each place its set, and which sample of it that is: of all that the run takes of it, from 0 on."""
        places = np.uint64(epoch * self.num_samples) + np.asarray(positions, dtype=np.uint64)
        size = np.uint64(sum(self.shares))
        block, slot = places // size, places % size
        numbers, which = np.unique(block, return_inverse=True)
        slot = permute(slot, int(size), keys(self.seed, numbers)[which.reshape(slot.shape)])
        ends = np.cumsum(np.array(self.shares, dtype=np.uint64))
        source = np.searchsorted(ends, slot, side="right").astype(np.uint64)
        share = np.array(self.shares, dtype=np.uint64)[source]
        return source, block * share + slot - (ends[source] - share)


def _of_epochs(order: Order, epochs: Indices, places: Indices) -> Indices:
    """Return the sample at each place of an order, each in an epoch of its own: of a tiny set there are many."""
    if isinstance(order, (Sequential, Shuffled, Windowed)):
        return order.samples(epochs, places)
    found = np.empty_like(places)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        found[here] = order.samples(int(epoch), places[here])
    return found


class Mixture(Dataset[Any]):
    """Samples of several sets, each as often as its weight is of their sum.

    Args:
        sources: map-style sets by name, whose samples are alike.
        weights: of the sets, by the same names; without any a set counts as much as it has samples.
        num_samples: of an epoch; ``None``: as many as the sets have together.
        block: places in which each set has its share, to the nearest sample; more where one would have none, and at
            most an epoch: without weights a small set's samples then come once in each.

    Raises:
        RequestError: there is no set, or one has no weight, no sample or no index, or is a mixture.
    """

    def __init__(
        self,
        sources: Mapping[str, Any],
        weights: Mapping[str, float] | None = None,
        num_samples: int | None = None,
        block: int = 1024,
    ) -> None:
        if num_samples is not None:
            require("data.num_samples", num_samples, Count)
        require("data.block", block, Count)
        for name, given in {"sources": sources, "source_weights": weights or {}}.items():
            if not isinstance(given, Mapping):
                raise RequestError(f"data.{name}={given} is not allowed. Allowed: names of sets, each with its own.")
        self.names, self.sources = [*sources], [*sources.values()]
        self._sizes = [size_of(source) for source in self.sources]
        self._ends = [*accumulate(self._sizes)]
        shares = dict(zip(self.names, self._sizes, strict=True)) if not weights else dict(weights)
        fits = all(isinstance(each, Real) and 0 < each < math.inf for each in shares.values())
        if not sources or shares.keys() != {*self.names} or not fits:
            raise RequestError(
                f"data.source_weights={shares} does not fit data.sources: {', '.join(self.names) or 'none'}, of "
                f"{self._sizes} samples. Give each set a weight above 0, and only these."
            )
        least = min(_LONGEST, math.ceil(sum(shares.values()) / min(shares.values())))  # places, for each to have one
        self.num_samples = len(self) if num_samples is None else num_samples
        self.shares = _shares([shares[name] for name in self.names], max(min(block, self.num_samples), least))
        for name, source in zip(self.names, self.sources, strict=True):
            if order_of(source, 0, True).repeats:
                raise RequestError(
                    f"data.sources.{name}, a {type(source).__name__}, draws its samples by weights itself. Give the "
                    f"sets that it is made of here, each with its weight."
                )

    def __len__(self) -> int:
        return sum(self._sizes)

    def sample_order(self, seed: int, shuffle: bool) -> Order:
        """Return the order of the mixture; sets that bring an order of their own keep it."""
        orders = tuple(order_of(source, key(seed, number), shuffle) for number, source in enumerate(self.sources))
        by_epoch = tuple(callable(getattr(source, "set_epoch", None)) for source in self.sources)
        return Mixed(orders, self.shares, self.num_samples, seed, by_epoch)

    def __getitem__(self, index: int) -> Any:
        epoch, index = divmod(index, len(self))
        number, first, _ = span(self._ends, index)
        source = self.sources[number]
        if callable(tell := getattr(source, "set_epoch", None)):
            tell(epoch)
        return source[index - first]

    def plan_rows(self, plan: BatchPlan) -> list[tuple[str, str]]:
        """Return what a dry run says of the mixture: how often each set is gone through in an epoch."""
        total = sum(self.shares)
        parts = [
            f"{name} {share / total:.1%} ({self.num_samples * share / total / size:.2f} of its epochs)"
            for name, share, size in zip(self.names, self.shares, self._sizes, strict=True)
        ]
        return [("mixture", ", ".join(parts))]


def _shares(weights: list[float], block: int) -> tuple[int, ...]:
    """Return how many places of a block each set has: at least one, the rest by largest remainders."""
    exact = np.array(weights, dtype=np.float64) / sum(weights) * block
    shares = np.maximum(np.floor(exact), 1).astype(int)
    for number in np.argsort(shares - exact, kind="stable")[: max(0, block - int(shares.sum()))]:
        shares[number] += 1
    return tuple(shares.tolist())
