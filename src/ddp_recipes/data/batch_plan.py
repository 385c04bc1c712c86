"""Data order that is computed, not stored: which samples are in each shard of each batch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from ddp_recipes.runtime.seeding import key

Indices = NDArray[np.uint64]

_BLOCK = 1 << 16  # positions permuted at once, or those of one batch, if that is larger
_BATCHES = 1 << 12  # of them at most: each is a tensor
_HALF_ROUNDS = 8


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


@dataclass(frozen=True)
class BatchPlan:
    """Which samples are in each shard of each batch: a function of (seed, epoch, batch, shard) and nothing else.

    The global order is cut into global batches, and each of them into shards: one a rank, or more where a strategy says
    so. Nothing is padded: the last global batch is as small as it is, and shards differ by one sample at most.

    Attributes:
        num_samples: size of the data set.
        global_batch_size: samples a batch over all shards.
        num_shards: over all ranks.
        sharding: ``contiguous`` gives a shard a block of the global batch, ``strided`` every n-th sample of it.
        max_batches: no more batches than this; ``None`` for all of them.
        weights: of the samples, which are then drawn with replacement, each as often as its weight is of their sum.
    """

    num_samples: int
    global_batch_size: int
    num_shards: int = 1
    seed: int = 0
    shuffle: bool = False
    drop_last: bool = False
    sharding: str = "contiguous"
    max_batches: int | None = None
    weights: NDArray[np.float64] | None = field(default=None, repr=False, compare=False)
    _blocks: dict[tuple[int, int], tuple[torch.Tensor, Sequence[torch.Tensor]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @cached_property
    def num_batches(self) -> int:
        """Global batches an epoch."""
        full, rest = divmod(self.num_samples, self.global_batch_size)
        available = full + (1 if rest and not self.drop_last else 0)
        return available if self.max_batches is None else min(self.max_batches, available)

    @cached_property
    def same_sizes(self) -> bool:
        """Whether the shards of each global batch have equally many samples."""
        last = self.size(self.num_batches - 1) if self.num_batches else 0
        return all(total % self.num_shards == 0 for total in (self.global_batch_size, last))

    def limited(self, max_batches: int) -> "BatchPlan":
        """Return the plan cut off after so many batches."""
        return replace(self, max_batches=max_batches)

    def size(self, batch: int, shard: int | None = None) -> int:
        """Return the number of samples in a global batch, or in a shard of it; one beyond the last has none."""
        total = min(self.global_batch_size, self.num_samples - batch * self.global_batch_size)
        if shard is None:
            return total
        return (total + self.num_shards - 1 - shard) // self.num_shards if shard < self.num_shards else 0

    def indices(self, epoch: int, batch: int, shard: int = 0) -> torch.Tensor:
        """Return the samples in a shard of a global batch, int64 [size]."""
        block, at = divmod(batch, self._batches_a_block)
        return self._shard(self._block(epoch, block)[1][at], shard)

    def positions(self, batch: int, shard: int = 0) -> torch.Tensor:
        """Return the places in the epoch's order of what :meth:`indices` returns."""
        start = batch * self.global_batch_size
        return self._shard(torch.arange(start, start + max(0, self.size(batch))), shard)

    def indices_of(self, epoch: int, batches: range, shard: int = 0) -> torch.Tensor:
        """Return the same of whole global batches in a row, int64 [batches, size]; of fewer where a block ends."""
        block, at = divmod(batches.start, self._batches_a_block)
        size = self.global_batch_size
        found = self._block(epoch, block)[0][at * size : (at + len(batches)) * size]
        return self._shard(found[: len(found) // size * size].view(-1, size), shard)

    def _shard(self, samples: torch.Tensor, shard: int) -> torch.Tensor:
        """Return a shard of each global batch, [..., samples] to [..., size]."""
        if shard >= self.num_shards:
            return samples[..., :0]
        if self.num_shards == 1:
            return samples
        if self.sharding == "strided":
            return samples[..., shard :: self.num_shards]
        each, more = divmod(samples.shape[-1], self.num_shards)
        start = shard * each + min(shard, more)
        return samples[..., start : start + each + (shard < more)]

    @cached_property
    def _summed_weights(self) -> NDArray[np.float64]:
        assert self.weights is not None
        return np.cumsum(self.weights)

    @cached_property
    def _batches_a_block(self) -> int:
        return max(1, min(_BLOCK // self.global_batch_size, _BATCHES))

    def _block(self, epoch: int, number: int) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """Return the samples of so many global batches in a row, and of each; the last two used are kept."""
        if (epoch, number) not in self._blocks:
            if len(self._blocks) > 1:
                self._blocks.clear()
            size = self._batches_a_block * self.global_batch_size
            positions = np.arange(number * size, min((number + 1) * size, self.num_samples), dtype=np.uint64)
            if self.weights is not None:
                samples = draw(positions, self._summed_weights, key(self.seed, epoch))
            elif self.shuffle:
                samples = permute(positions, self.num_samples, key(self.seed, epoch))
            else:
                samples = positions
            indices = torch.from_numpy(samples.view(np.int64))
            self._blocks[epoch, number] = indices, torch.split(indices, self.global_batch_size)
        return self._blocks[epoch, number]
