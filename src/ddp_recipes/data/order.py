"""Which samples come when: orders of an epoch that are computed, not stored, and their cut into batches and shards."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ddp_recipes.runtime.seeding import key, keys

Indices = NDArray[np.uint64]

_HALF_ROUNDS = 8


class Order(Protocol):
    """Which sample comes at each place of each epoch: a function of the epoch and the place, whoever asks and when.

    So a run resumes anywhere and on any number of ranks, with nothing to restore. A map-style data set may bring its
    own: its method ``sample_order(seed: int, shuffle: bool)`` returns it.
    """

    @property
    def repeats(self) -> bool:
        """Whether a sample may come more than once an epoch. Its random numbers are then keyed by its place."""
        ...

    def __len__(self) -> int:
        """Return how many places an epoch has."""
        ...

    def samples(self, epoch: int, positions: Indices) -> Indices:
        """Return the sample at each of these places, which are below ``len(self)``; of the same shape."""
        ...


@dataclass(frozen=True)
class Sequential:
    """Samples in the order of the data set; as of :class:`Shuffled`, each place may be of an epoch of its own."""

    num_samples: int
    repeats = False

    def __len__(self) -> int:
        return self.num_samples

    def samples(self, epoch: int | Indices, positions: Indices) -> Indices:
        return positions


@dataclass(frozen=True)
class Shuffled:
    """Each sample once, in an order that is another one in each epoch and for each seed."""

    num_samples: int
    seed: int
    repeats = False

    def __len__(self) -> int:
        return self.num_samples

    def samples(self, epoch: int | Indices, positions: Indices) -> Indices:
        seed = key(self.seed, epoch) if not isinstance(epoch, np.ndarray) else keys(self.seed, epoch)
        return permute(positions, self.num_samples, seed)


@dataclass(frozen=True)
class Drawn:
    """Samples drawn with replacement, each as often as its weight is of their sum; as many as there are weights."""

    weights: NDArray[np.float64] = field(repr=False, compare=False)
    seed: int
    repeats = True

    def __len__(self) -> int:
        return len(self.weights)

    def samples(self, epoch: int, positions: Indices) -> Indices:
        return draw(positions, self._summed_weights, key(self.seed, epoch))

    @cached_property
    def _summed_weights(self) -> NDArray[np.float64]:
        return np.cumsum(self.weights)


@dataclass(frozen=True)
class FirstEpoch:
    """The first epoch of another order, again and again: what ``trainer.overfit_batches`` repeats."""

    order: Order

    def __len__(self) -> int:
        return len(self.order)

    @property
    def repeats(self) -> bool:
        return self.order.repeats

    def samples(self, epoch: int, positions: Indices) -> Indices:
        return self.order.samples(0, positions)


@dataclass(frozen=True, eq=False)
class Bucketed:
    """An order in which samples of like length stand together, batch by batch.

    Each ``window`` of another order is sorted by length and cut into batches, which are permuted; what is left of a
    window comes last.

    Attributes:
        lengths: of the samples; numbers of samples count modulo how many there are.
        batch: samples of a batch.
        window: places that are sorted together, a multiple of that.
    """

    order: Order
    lengths: NDArray[np.int64] = field(repr=False)
    batch: int
    window: int
    seed: int

    def __len__(self) -> int:
        return len(self.order)

    @property
    def repeats(self) -> bool:
        return self.order.repeats

    def samples(self, epoch: int, positions: Indices) -> Indices:
        positions = np.asarray(positions, dtype=np.uint64)
        window = positions // np.uint64(self.window)
        found = np.empty_like(positions)
        for number in np.unique(window):
            here = window == number
            found[here] = _sorted_window(self, epoch, int(number))[positions[here] % np.uint64(self.window)]
        return found


@lru_cache(maxsize=4)
def _sorted_window(order: Bucketed, epoch: int, number: int) -> Indices:
    """Return the samples of a window, batch by batch."""
    first = number * order.window
    places = np.arange(first, min(first + order.window, len(order)), dtype=np.uint64)
    samples = order.order.samples(epoch, places)
    samples = samples[np.argsort(order.lengths[samples % np.uint64(len(order.lengths))], kind="stable")]
    batches = len(samples) // order.batch
    if not batches:
        return samples
    turns = permute(np.arange(batches, dtype=np.uint64), batches, key(order.seed, epoch, number))
    whole = samples[: batches * order.batch].reshape(batches, order.batch)
    # What is left, the longest, comes last, so that batches begin where the plan has them begin.
    return np.concatenate([whole[turns].ravel(), samples[batches * order.batch :]])


def order_of(dataset: Any, seed: int, shuffle: bool) -> Order:
    """Return the order of a map-style data set's samples: its own (``sample_order``), a shuffle, or as they lie."""
    if callable(own := getattr(dataset, "sample_order", None)):
        order: Order = own(seed, shuffle)
        return order
    return Shuffled(len(dataset), seed) if shuffle else Sequential(len(dataset))


def permute(positions: Indices, n: int, seed: int | Indices) -> Indices:
    """Map positions to samples by a keyed bijection of ``range(n)``: a shuffle without a list of n numbers.

    A Feistel network over an a x b grid that just holds n (the generalised construction of Black & Rogaway, "Ciphers
    with Arbitrary Finite Domains", 2002); what falls outside is encrypted again (cycle walking), less than a in n do.

    Args:
        positions: numbers below n, any shape.
        seed: the key; another key is another shuffle. Or one for each position.
    """
    rows = np.uint64(math.isqrt(n - 1) + 1)
    columns = np.uint64(-(-n // int(rows)))
    rounds = range(_HALF_ROUNDS)
    round_keys = [np.uint64(key(seed, i)) if isinstance(seed, int) else keys(seed, i) for i in rounds]

    def encrypt(values: Indices) -> Indices:
        left = values // columns
        right = values - left * columns
        for i in range(0, _HALF_ROUNDS, 2):
            left = _remainder(left + _mix(right, round_keys[i]), rows)
            right = _remainder(right + _mix(left, round_keys[i + 1]), columns)
        return left * columns + right

    samples = encrypt(positions)
    if (outside := samples >= n).any():
        samples[outside] = permute(samples[outside], n, seed if isinstance(seed, int) else seed[outside])
    return samples


def draw(positions: Indices, summed_weights: NDArray[np.float64], seed: int) -> Indices:
    """Draw a sample for each position, with replacement: a function of the position and the key alone.

    Args:
        summed_weights: of the samples up to and with each.
    """
    uniform = (_mix(positions, np.uint64(seed)) + 0.5) / 2.0**48
    samples = np.searchsorted(summed_weights, uniform * summed_weights[-1], side="right")
    last = np.searchsorted(summed_weights, summed_weights[-1])  # rounding must not draw one of weight 0 behind it
    drawn: Indices = np.minimum(samples, last).astype(np.uint64)
    return drawn


def _remainder(values: Indices, divisor: np.uint64) -> Indices:
    """Return what is left of a division by one number. NumPy's own ``%`` takes twice as long: it really divides."""
    return values - values // divisor * divisor


def _mix(values: Indices, round_key: np.uint64 | Indices) -> Indices:
    """Scramble 64-bit values (the finaliser of MurmurHash3); 48 bits come back, so that a sum never overflows."""
    values = values ^ round_key
    values = (values ^ (values >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    values = (values ^ (values >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return values >> np.uint64(16)


# --- batches and shards

UNKNOWN = 1 << 62  # batches, or samples, as long as nobody has seen the end; floats hold it exactly
_BLOCK = 1 << 16  # positions permuted at once, or those of one batch, if that is larger
FEW = 8  # samples that tell an epoch's order from others
_BATCHES = 1 << 12  # of them at most: each is a tensor


@dataclass(frozen=True)
class BatchPlan:
    """Which samples are in each shard of each batch: a function of its order, (epoch, batch, shard) and nothing else.

    The order is cut into global batches, and each of them into shards: one a rank, or more where a strategy says
    so. Nothing is padded: the last global batch is as small as it is, and shards differ by one sample at most.

    Attributes:
        order: which sample comes at each place of an epoch.
        global_batch_size: samples a batch over all shards.
        num_shards: over all ranks.
        seed: that random numbers of its samples are keyed by.
        sharding: ``contiguous`` gives a shard a block of the global batch, ``strided`` every n-th sample of it.
        max_batches: no more batches than this; ``None`` for all of them.
    """

    order: Order
    global_batch_size: int
    num_shards: int = 1
    seed: int = 0
    drop_last: bool = False
    sharding: str = "contiguous"
    max_batches: int | None = None
    uniform: ClassVar[bool] = True  # whether all batches have a size, but for the last
    _blocks: dict[tuple[int, int], tuple[torch.Tensor, Sequence[torch.Tensor]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @cached_property
    def num_samples(self) -> int:
        """Samples an epoch."""
        return len(self.order)

    @cached_property
    def num_batches(self) -> int:
        """Global batches an epoch."""
        full, rest = divmod(self.num_samples, self.global_batch_size)
        available = full + (1 if rest and not self.drop_last else 0)
        return available if self.max_batches is None else min(self.max_batches, available)

    @property
    def repeats(self) -> bool:
        """Whether a sample may come more than once an epoch. Its random numbers are then keyed by its place."""
        return self.order.repeats

    @property
    def planned_batches(self) -> float:
        """The same as it was before anything was read, which does not depend on how far ranks have read ahead."""
        return self.num_batches

    @cached_property
    def same_sizes(self) -> bool:
        """Whether the shards of each global batch have equally many samples."""
        last = self.size(self.num_batches - 1) if self.num_batches else 0
        return all(total % self.num_shards == 0 for total in (self.global_batch_size, last))

    @property
    def is_even(self) -> bool:
        """Whether each shard of each global batch has a sample."""
        return all(self.size(self.num_batches - 1, shard) for shard in range(self.num_shards))

    def enter(self, epoch: int) -> None:
        """Take note of the epoch whose batches come next, for a plan of which not all epochs are alike."""

    def limited(self, max_batches: int) -> "BatchPlan":
        """Return the plan cut off after so many batches."""
        return replace(self, max_batches=max_batches)

    def size(self, batch: int, shard: int | None = None) -> int:
        """Return the number of samples in a global batch, or in a shard of it; one beyond the last has none."""
        total = min(self.global_batch_size, self.num_samples - batch * self.global_batch_size)
        return total if shard is None else self._size_of_shard(total, shard)

    def _size_of_shard(self, total: int, shard: int) -> int:
        """Return how many of so many samples of a global batch a shard has."""
        return (total + self.num_shards - 1 - shard) // self.num_shards if shard < self.num_shards else 0

    def indices(self, epoch: int, batch: int, shard: int = 0) -> torch.Tensor:
        """Return the samples in a shard of a global batch, int64 [size]."""
        block, at = divmod(batch, self._batches_a_block)
        if not self._blocks:  # the first of a run is waited for, and its block would take some ten times as long
            alone = self._samples(epoch, range(batch, batch + 1))
            self._blocks[epoch, -1 - batch] = alone, [alone]
            return self._shard(alone, shard)
        return self._shard(self._block(epoch, block)[1][at], shard)

    def first(self, epoch: int) -> list[int]:
        """Return the first few samples of an epoch, which tell its order from others."""
        found: list[int] = self.order.samples(epoch, np.arange(min(FEW, self.num_samples), dtype=np.uint64)).tolist()
        return found

    def positions(self, batch: int, shard: int = 0) -> torch.Tensor:
        """Return the places in the epoch's order of what :meth:`indices` returns."""
        start = batch * self.global_batch_size
        return self._shard(torch.arange(start, start + max(0, self.size(batch))), shard)

    def indices_of(self, epoch: int, batches: range, shard: int = 0) -> torch.Tensor:
        """Return the sample indices of consecutive global batches, int64 [batches, size]; fewer where a block ends."""
        block, at = divmod(batches.start, self._batches_a_block)
        size = self.global_batch_size
        found = self._block(epoch, block)[0][at * size : (at + len(batches)) * size]
        return self._shard(found[: len(found) // size * size].view(-1, size), shard)

    def _shard(self, samples: torch.Tensor, shard: int) -> torch.Tensor:
        """Return a shard of each global batch, [..., samples] to [..., size]."""
        return samples if self.num_shards == 1 and shard == 0 else samples[..., self.places(samples.shape[-1], shard)]

    def places(self, total: int, shard: int) -> slice:
        """Return the places of a shard in a global batch of so many samples."""
        if shard >= self.num_shards:
            return slice(0, 0)
        if self.sharding == "strided":
            return slice(shard, None, self.num_shards)
        each, more = divmod(total, self.num_shards)
        start = shard * each + min(shard, more)
        return slice(start, start + each + (shard < more))

    @cached_property
    def _batches_a_block(self) -> int:
        return max(1, min(_BLOCK // self.global_batch_size, _BATCHES))

    def _block(self, epoch: int, number: int) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """Return the samples of so many global batches in a row, and of each; the last two used are kept."""
        if (epoch, number) not in self._blocks:
            if len(self._blocks) > 1:
                self._blocks.clear()
            indices = self._samples(epoch, range(number * self._batches_a_block, (number + 1) * self._batches_a_block))
            self._blocks[epoch, number] = indices, torch.split(indices, self.global_batch_size)
        return self._blocks[epoch, number]

    def _samples(self, epoch: int, batches: range) -> torch.Tensor:
        """Return the samples of consecutive global batches."""
        start, stop = batches.start * self.global_batch_size, batches.stop * self.global_batch_size
        positions = np.arange(start, min(stop, self.num_samples), dtype=np.uint64)
        return torch.from_numpy(self.order.samples(epoch, positions).view(np.int64))
