"""Which samples come at which places of an epoch: orders that are computed, not stored."""

import math
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ddp_recipes.runtime.seeding import key

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
    """Samples in the order of the data set."""

    num_samples: int
    repeats = False

    def __len__(self) -> int:
        return self.num_samples

    def samples(self, epoch: int, positions: Indices) -> Indices:
        """Return the places themselves."""
        return positions


@dataclass(frozen=True)
class Shuffled:
    """Each sample once, in an order that is another one in each epoch and for each seed."""

    num_samples: int
    seed: int
    repeats = False

    def __len__(self) -> int:
        return self.num_samples

    def samples(self, epoch: int, positions: Indices) -> Indices:
        """Return the sample at each place of the shuffle of an epoch."""
        return permute(positions, self.num_samples, key(self.seed, epoch))


@dataclass(frozen=True)
class Drawn:
    """Samples drawn with replacement, each as often as its weight is of their sum; as many as there are weights."""

    weights: NDArray[np.float64] = field(repr=False, compare=False)
    seed: int
    repeats = True

    def __len__(self) -> int:
        return len(self.weights)

    def samples(self, epoch: int, positions: Indices) -> Indices:
        """Return the sample drawn for each place."""
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
        """As the order itself."""
        return self.order.repeats

    def samples(self, epoch: int, positions: Indices) -> Indices:
        """Return the sample at each place of the first epoch."""
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
        """As the order that is sorted."""
        return self.order.repeats

    def samples(self, epoch: int, positions: Indices) -> Indices:
        """Return the sample at each place of an epoch."""
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


def permute(positions: Indices, n: int, seed: int) -> Indices:
    """Map positions to samples by a keyed bijection of ``range(n)``: a shuffle without a list of n numbers.

    A Feistel network over an a x b grid that just holds n (the generalised construction of Black & Rogaway, "Ciphers
    with Arbitrary Finite Domains", 2002); what falls outside is encrypted again (cycle walking), less than a in n do.

    Args:
        positions: numbers below n, any shape.
        seed: the key; another key is another shuffle.
    """
    rows = np.uint64(math.isqrt(n - 1) + 1)
    columns = np.uint64(-(-n // int(rows)))
    keys = [np.uint64(key(seed, i)) for i in range(_HALF_ROUNDS)]

    def encrypt(values: Indices) -> Indices:
        left = values // columns
        right = values - left * columns
        for i in range(0, _HALF_ROUNDS, 2):
            left = _remainder(left + _mix(right, keys[i]), rows)
            right = _remainder(right + _mix(left, keys[i + 1]), columns)
        return left * columns + right

    samples = encrypt(positions)
    while (outside := samples >= n).any():
        samples[outside] = encrypt(samples[outside])
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


def _mix(values: Indices, round_key: np.uint64) -> Indices:
    """Scramble 64-bit values (the finaliser of MurmurHash3); 48 bits come back, so that a sum never overflows."""
    values = values ^ round_key
    values = (values ^ (values >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    values = (values ^ (values >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return values >> np.uint64(16)
