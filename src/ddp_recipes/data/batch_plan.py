"""Data order that is computed, not stored: which samples are in each part of each batch."""

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
    """Which samples are in each part of each batch: a function of (seed, epoch, batch, part) and nothing else.

    The global order is cut into global batches, and each of them into parts: one a rank, or more where a strategy says
    so. Nothing is padded: the last global batch is as small as it is, and shares differ by one sample at most.

    Attributes:
        num_samples: size of the data set.
        global_batch_size: samples a batch over all parts.
        parts: how many parts a batch has, over all ranks.
        shard: ``contiguous`` gives a part a block of the global batch, ``strided`` every parts-th sample of it.
        max_batches: no more batches than this; ``None`` for all of them.
    """

    num_samples: int
    global_batch_size: int
    parts: int = 1
    seed: int = 0
    shuffle: bool = False
    drop_last: bool = False
    shard: str = "contiguous"
    max_batches: int | None = None
    _blocks: dict[tuple[int, int], tuple[torch.Tensor, Sequence[torch.Tensor]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @cached_property
    def num_batches(self) -> int:
        """Global batches an epoch."""
        full, rest = divmod(self.num_samples, self.global_batch_size)
        available = full + (1 if rest and not self.drop_last else 0)
        return available if self.max_batches is None else min(self.max_batches, available)

    def limited(self, max_batches: int) -> "BatchPlan":
        """Return the plan cut off after so many batches."""
        return replace(self, max_batches=max_batches)

    def total(self, batch: int) -> int:
        """Return the number of samples in a global batch."""
        return min(self.global_batch_size, self.num_samples - batch * self.global_batch_size)

    def share(self, batch: int, part: int = 0) -> int:
        """Return how many of them are in a part; it may be none."""
        each, more = divmod(self.total(batch), self.parts)
        return each + (part < more)

    def samples(self, batches: range, part: int | None = None) -> int:
        """Return the number of samples in these global batches, or in a part of each."""
        count = 0
        for batch in batches:
            count += self.total(batch) if part is None else self.share(batch, part)
        return count

    def indices(self, epoch: int, batch: int, part: int = 0) -> torch.Tensor:
        """Return the samples in a part of a global batch, int64 [share(batch, part)]."""
        block, at = divmod(batch, self._batches_a_block)
        _, batches = self._block(epoch, block)
        return self._part(batches[at], part)

    def indices_of(self, epoch: int, batches: range, part: int = 0) -> torch.Tensor:
        """Return the same of whole global batches in a row, int64 [batches, share]; of fewer where a block ends."""
        block, at = divmod(batches.start, self._batches_a_block)
        samples, _ = self._block(epoch, block)
        size = self.global_batch_size
        found = samples[at * size : (at + len(batches)) * size]
        return self._part(found[: len(found) // size * size].view(-1, size), part)

    def _part(self, samples: torch.Tensor, part: int) -> torch.Tensor:
        """Return a part of each global batch, [..., samples] to [..., share]."""
        if self.parts == 1:
            return samples
        if self.shard == "strided":
            return samples[..., part :: self.parts]
        each, more = divmod(samples.shape[-1], self.parts)
        start = part * each + min(part, more)
        return samples[..., start : start + each + (part < more)]

    @cached_property
    def _batches_a_block(self) -> int:
        return max(1, min(_BLOCK // self.global_batch_size, _BATCHES))

    def _block(self, epoch: int, number: int) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """Return the samples of so many global batches in a row, and of each; the last two asked for are kept."""
        if (epoch, number) not in self._blocks:
            if len(self._blocks) > 1:
                self._blocks.clear()
            size = self._batches_a_block * self.global_batch_size
            positions = np.arange(number * size, min((number + 1) * size, self.num_samples), dtype=np.uint64)
            samples = permute(positions, self.num_samples, key(self.seed, epoch)) if self.shuffle else positions
            indices = torch.from_numpy(samples.view(np.int64))
            self._blocks[epoch, number] = indices, torch.split(indices, self.global_batch_size)
        return self._blocks[epoch, number]
