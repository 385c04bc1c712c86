"""The order of a set in shards: shards are permuted, then rows within windows; and how well that shuffles."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ddp_recipes.data.order import BatchPlan, Indices, Order, permute
from ddp_recipes.runtime.seeding import keys
from ddp_recipes.streams.index import Shard

_SHARDS, _ROWS = 0, 1  # what a key is for


@dataclass(frozen=True, eq=False)
class Windowed:
    """Each row once: shards in an order that is another one in each epoch, rows permuted within windows of them.

    Shards, permuted and put one after the other, are cut into ``interleave`` lanes of the same length, which take turns
    row by row. Each lane is cut into windows, and a window's rows are permuted. All of it is computed by keyed
    permutations: nothing is stored but how many rows each shard has.

    Attributes:
        rows: of each shard; samples are numbered through them.
        window: rows that are permuted among each other, over all lanes.
        interleave: lanes.
    """

    rows: tuple[int, ...] = field(repr=False)
    seed: int
    window: int
    interleave: int = 1
    repeats = False

    def __len__(self) -> int:
        return sum(self.rows)

    def samples(self, epoch: int | Indices, positions: Indices) -> Indices:
        """Return the sample at each place of an epoch's order, or of the order of an epoch for each place."""
        places = self.places(epoch, positions)
        if not isinstance(epoch, np.ndarray):
            layout = self.layout(epoch)
        else:  # one epoch's shards after the other's
            epochs, which = np.unique(epoch, return_inverse=True)
            layout = _laid_out(self, epochs)
            places += which.reshape(places.shape).astype(np.uint64) * np.uint64(len(self))
        turn = np.searchsorted(layout.ends, places, side="right")
        return layout.starts[turn] + places - (layout.ends[turn] - layout.rows[turn])

    def places(self, epoch: int | Indices, positions: Indices) -> Indices:
        """Return where the row at each place of the order lies in the shards as they come in an epoch."""
        positions = np.asarray(positions, dtype=np.uint64)
        total, lanes = len(self), self.lanes
        row, lane = positions // np.uint64(lanes), positions % np.uint64(lanes)
        shortest, longer = divmod(total, lanes)
        start = lane * np.uint64(shortest) + np.minimum(lane, np.uint64(longer))
        length = np.uint64(shortest) + (lane < longer).astype(np.uint64)
        size = np.uint64(self.rows_of_a_window)
        first = row // size * size  # of the window
        rows = np.minimum(size, length - first)
        number = first // size * np.uint64(lanes) + lane
        if not isinstance(epoch, np.ndarray):
            numbers, which = np.unique(number, return_inverse=True)
            own = keys(self.seed, epoch, _ROWS, numbers)[which.reshape(first.shape)]
        else:
            own = keys(self.seed, epoch, _ROWS, number)
        found: Indices = start + first
        # Of windows that are full, and of the last ones. NumPy's ``unique`` would load a module, for 20 ms.
        lengths = (shortest, shortest + 1)
        for count in {each % int(size) for each in lengths} | {min(int(size), each) for each in lengths}:
            here = rows == np.uint64(count)
            if here.any():
                found[here] += permute(row[here] - first[here], count, own[here])
        return found

    @property
    def lanes(self) -> int:
        """Lanes that there are: no more than rows."""
        return max(1, min(self.interleave, len(self)))

    @property
    def rows_of_a_window(self) -> int:
        """Rows of a window in each lane."""
        return max(1, self.window // self.lanes)

    def shards(self, epoch: int) -> NDArray[np.int64]:
        """Return the numbers of the shards as they come in an epoch."""
        return self.layout(epoch).shards

    def layout(self, epoch: int) -> "Layout":
        """Return the shards of an epoch as they come."""
        return _layout(self, epoch)


class Layout(NamedTuple):
    """Shards as they come in an epoch, or in several: their numbers, first samples and rows, and where they end."""

    shards: NDArray[np.int64]
    starts: Indices
    rows: Indices
    ends: Indices


@lru_cache(maxsize=4)
def _layout(order: Windowed, epoch: int) -> Layout:
    return _laid_out(order, np.array([epoch], dtype=np.uint64))


def _laid_out(order: Windowed, epochs: Indices) -> Layout:
    count, rows = len(order.rows), np.array(order.rows, dtype=np.uint64)
    own = np.repeat(keys(order.seed, epochs, _SHARDS), count)
    shards = permute(np.tile(np.arange(count, dtype=np.uint64), len(epochs)), count, own).astype(np.int64)
    starts = np.cumsum(rows, dtype=np.uint64) - rows
    return Layout(shards, starts[shards], rows[shards], np.cumsum(rows[shards], dtype=np.uint64))


# --- quality and cost ------------------------------------------------------------------------------------------------

_CHUNKS, _CHUNK = 64, 4096  # of an epoch's order that is looked at
_LOOKED_AT = 1 << 17  # places, for what is read


class Quality(NamedTuple):
    """How well an order shuffles, each next to what a full shuffle has.

    Attributes:
        displacement: mean distance between a sample's place in the order and in the set, as a part of a full shuffle's,
            which is a third of the set: 1 is a full shuffle, 0 none.
        correlation: of the places in the set of samples that follow each other: 0 is a full shuffle, 1 none.
        batch_variance: variance of a batch's mean place in the set, as a multiple of that of a batch drawn at random: 1
            is a full shuffle; at n, a batch of a sorted set tells as much of the set as one n times smaller would.
    """

    displacement: float
    correlation: float
    batch_variance: float


def quality(order: Order, batch: int, epochs: Sequence[int] = (0, 1, 2, 3)) -> Quality:
    """Return how well an order shuffles, from runs of places spread over some epochs.

    Args:
        batch: samples of a global batch.
    """
    total = len(order)
    if total < 2:
        return Quality(1.0, 0.0, 1.0)  # there is one order
    size = min(max(2, batch), total)
    length = min(total, max(_CHUNK, 8 * size))
    displaced, pairs, means = [], [], []
    for epoch in epochs:
        for first in np.unique(np.linspace(0, total - length, min(_CHUNKS, 1 + total // length)).astype(np.uint64)):
            positions = first + np.arange(length, dtype=np.uint64)
            samples = order.samples(epoch, positions).astype(np.float64)
            displaced.append(np.abs(samples - positions).mean())
            pairs.append(((samples[1:] - (total - 1) / 2) * (samples[:-1] - (total - 1) / 2)).mean())
            means += [each.mean() for each in samples[: length // size * size].reshape(-1, size)]
    variance = (total * total - 1) / 12
    expected = variance / size * (total - size) / max(1, total - 1)  # drawn without replacement
    spread = np.mean((np.array(means) - (total - 1) / 2) ** 2)
    return Quality(
        displacement=float(np.mean(displaced) / max(1e-12, (total * total - 1) / (3 * total))),
        correlation=float(np.mean(pairs) / max(variance, 1e-12)),
        batch_variance=float(spread / expected) if expected > 0 else 1.0,
    )


class Cost(NamedTuple):
    """What an order takes of each process that reads.

    Attributes:
        memory: bytes of row groups that its windows need, and how many it may keep.
        files: that are open at a time.
        times_read: how often a byte of the set is read by all processes together, from a run of places.
    """

    memory: int
    limit: int
    files: int
    times_read: float

    def __str__(self) -> str:
        kept = f"{self.memory / 1e6:.3g} MB of row groups (of data.memory_mb={self.limit / 1e6:.3g})"
        return (
            f"{kept if self.memory else 'no row groups in memory'}, {self.files} open file(s) in each reading process; "
            f"each byte is read {self.times_read:.2f} times"
        )


def memory_of_windows(order: Windowed, shards: Sequence[Shard]) -> int:
    """Return the bytes of row groups that the windows of all lanes lie in; 0 where rows are read one by one."""
    groups = sum(shard.groups for shard in shards)
    if not groups:
        return 0
    spanned = 1 + -(-order.rows_of_a_window // max(1, len(order) // groups))
    return round(min(order.lanes * spanned, groups) * sum(shard.memory for shard in shards) / groups)


def files_of_windows(order: Windowed) -> int:
    """Return about how many shards the windows of all lanes lie in."""
    mean = len(order) / len(order.rows)
    return min(order.lanes * (1 + -(-order.rows_of_a_window // max(1, round(mean)))), len(order.rows))


def held_bytes(order: Windowed, shards: Sequence[Shard], limit: int) -> int:
    """Return the bytes of row groups that a process keeps: no more than of a window that ends and of the next.

    Memory that is used again is there already, while new memory has to be had page by page.
    """
    needed = memory_of_windows(order, shards)
    return min(limit, 2 * needed) if needed else limit


def cost(order: Windowed, shards: Sequence[Shard], plan: BatchPlan, limit: int) -> Cost:
    """Return what an order takes of a process that reads one shard of each batch, computed for the first batches.

    Args:
        shards: in the order of ``order.rows``.
        limit: bytes of row groups that a process keeps.
    """
    files = files_of_windows(order)
    if not (memory := memory_of_windows(order, shards)):
        return Cost(0, limit, files, 1.0)
    held = held_bytes(order, shards, limit)
    read = sum(_read(order, shards, plan, held, shard) for shard in range(plan.num_shards))
    once = _read(order, shards, replace(plan, num_shards=1), 1 << 62, 0)
    return Cost(memory, limit, files, read / once)


def _read(order: Windowed, shards: Sequence[Shard], plan: BatchPlan, limit: int, shard: int) -> int:
    """Return the bytes of row groups that one reader reads for the first places of an epoch."""
    batches = range(min(plan.num_batches, -(-_LOOKED_AT // plan.global_batch_size)))
    samples = np.concatenate([plan.indices(0, batch, shard).numpy() for batch in batches])
    ends = np.cumsum(order.rows)
    of = np.searchsorted(ends, samples, side="right")
    held: OrderedDict[tuple[int, int], int] = OrderedDict()
    size = read = 0
    for number, row in zip(of.tolist(), (samples - (ends[of] - np.array(order.rows)[of])).tolist(), strict=True):
        each = shards[number]
        name = number, row * each.groups // max(1, each.rows)
        if name in held:
            held.move_to_end(name)
            continue
        held[name] = each.memory // max(1, each.groups)
        size += held[name]
        read += held[name]
        while size > limit and len(held) > 1:
            size -= held.popitem(last=False)[1]
    return read
