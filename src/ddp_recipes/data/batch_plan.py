"""An epoch's order cut into batches and shards: which samples are in each shard of each batch."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch

from ddp_recipes.data.order import Order

UNKNOWN = 1 << 62  # batches, or samples, as long as nobody has seen the end; floats hold it exactly
_BLOCK = 1 << 16  # positions permuted at once, or those of one batch, if that is larger
_FEW = 8
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
        return self._shard(self._block(epoch, block)[1][at], shard)

    def first(self, epoch: int) -> list[int]:
        """Return the first few samples of an epoch, which tell its order from others."""
        found: list[int] = self.order.samples(epoch, np.arange(min(_FEW, self.num_samples), dtype=np.uint64)).tolist()
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
            size = self._batches_a_block * self.global_batch_size
            positions = np.arange(number * size, min((number + 1) * size, self.num_samples), dtype=np.uint64)
            indices = torch.from_numpy(self.order.samples(epoch, positions).view(np.int64))
            self._blocks[epoch, number] = indices, torch.split(indices, self.global_batch_size)
        return self._blocks[epoch, number]
