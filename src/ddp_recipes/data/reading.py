"""Streams as a rank reads them: in its own process or in data workers, cut into its shards of global batches."""

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from enum import IntEnum
from inspect import signature
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from ddp_recipes._compat.torch_ import notice_numbers, tree_leaves
from ddp_recipes.data.keyed import samples_in, taken
from ddp_recipes.data.one_by_one import follow_rank, refuse_devices
from ddp_recipes.data.order import BatchPlan
from ddp_recipes.runtime.seeding import key, seeded


class Kind(IntEnum):
    """What an item of a data worker is."""

    BATCH = 0
    END = 1  # the worker has no more
    TURN = 2  # nothing: it gives the first turn of a resumed epoch to the worker after it


class Item(NamedTuple):
    """What a rank has read of a global batch.

    Attributes:
        data: its shard, or a sample that does not count where that has none; ``None`` where the batch is skipped.
        num_samples: of the shard.
        total: read for it.
        mark: a checksum of the first sample that was read.
        worker, number: which worker has read it, as its how-many-th.
        state: of the data set afterwards, where it has one.
        asked: whether the data set has asked in which worker it is; ``None`` without workers.
        skipped: names of samples that the data set has left out meanwhile.
    """

    kind: Kind
    worker: int
    number: int = 0
    data: Any = None
    num_samples: int = 0
    total: int = 0
    mark: int = 0
    state: Any = None
    asked: bool | None = None
    skipped: tuple[str, ...] = ()


class Saved(NamedTuple):
    """Where a worker goes on: after so many batches, with that state of its data set."""

    batches: int = 0
    state: Any = None
    ended: bool = False


@dataclass(frozen=True)
class Start:
    """Where an epoch begins: at batch ``skip``, or where ``workers`` have stopped, of which number ``turn`` is next."""

    epoch: int = 0
    skip: int = 0
    workers: Sequence[Saved] = ()
    turn: int = 0


class Cut(IterableDataset[Item]):
    """The stream of a data set, cut into this rank's shards of global batches.

    What the set draws at random (from torch, ``random`` or NumPy) while a batch is read follows from (seed, epoch,
    worker, batch), so it is the same on all ranks that read the same.

    Args:
        plan: says how large a global batch and a shard are.
        shared: whether the stream is that of all shards, of which this one is a part; else it is this shard's alone.
        batched: whether what the set gives are whole batches: a global batch has one for each shard.
        begin_worker: the user's own ``worker_init_fn``.
        replays: whether a resumed run reads the stream again though the set has a state.
    """

    def __init__(
        self,
        dataset: Any,
        plan: BatchPlan,
        shard: int,
        *,
        shared: bool,
        batched: bool,
        collate_fn: Callable[[list[Any]], Any],
        name: str,
        begin_worker: Callable[[int], None] | None = None,
        replays: bool = False,
    ) -> None:
        self.dataset, self.plan, self.shard, self.shared, self.batched = dataset, plan, shard, shared, batched
        self.collate_fn, self.name, self.begin_worker = collate_fn, name, begin_worker
        self.keyed = 0 if shared else 1 + shard  # ranks that read different streams draw different numbers
        self.has_state = not replays and _takes(dataset, "state_dict") and _takes(dataset, "load_state_dict", {})
        self.start = Start()
        self.worker, self.workers = 0, 1
        self.asked: Callable[[], bool | None] = _unknown

    @property
    def at_once(self) -> int:
        """How much is read for a batch."""
        if self.batched:
            return self.plan.num_shards if self.shared else 1
        return self.plan.global_batch_size if self.shared else self.plan.size(0, self.shard)

    def __iter__(self) -> Iterator[Item]:
        start, me = self.start, self.worker
        saved = start.workers[me] if me < len(start.workers) else Saved()
        if me < start.turn:
            yield Item(Kind.TURN, me)
        if saved.ended:
            return
        samples, count, at_once = None, saved.batches, self.at_once
        while True:
            with self._drawing(start.epoch, count):
                samples = self._opened(saved.state) if samples is None else samples
                read = self._read(samples, at_once, count)
                if me and not self.asked():  # who does not ask gives the same in each worker: the first has it all
                    return
                skipped = not start.workers and count * self.workers + me < start.skip
                item = self._item(read, count, skipped) if read else None
            if item is not None:
                yield item
            if len(read) < at_once:
                break
            count += 1
        yield Item(Kind.END, me, skipped=taken())

    @contextmanager
    def _drawing(self, epoch: int, count: int) -> Iterator[None]:
        """Seed what a batch draws, and have one thread: sums on several have other bits."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with seeded(key(self.plan.seed, epoch, self.keyed, self.worker, count)):
                yield
        finally:
            torch.set_num_threads(threads)

    def _opened(self, state: Any) -> Iterator[Any]:
        """Return an iterator over the set, from where it was."""
        if state is not None:
            self.dataset.load_state_dict(state)
        return iter(self.dataset)

    def _read(self, samples: Iterator[Any], at_once: int, count: int) -> list[Any]:
        read: list[Any] = []
        try:
            while len(read) < at_once:
                read.append(next(samples))  # no more than that: of some, __iter__ of the iterator begins anew
        except StopIteration:
            pass
        except Exception as error:
            error.add_note(
                f"{type(error).__name__} while {self.name}, a {type(self.dataset).__name__}, was read for its batch "
                f"{count}{f' in data worker {self.worker}' if self.workers > 1 else ''}: {error}"
            )
            raise
        return read

    def _item(self, read: list[Any], count: int, skipped: bool) -> Item | None:
        """Return this rank's shard of what was read; nothing where an incomplete batch is to be dropped."""
        if self.plan.drop_last and len(read) < self.at_once:
            return None
        own = read[self.plan.places(len(read), self.shard)] if self.shared else read
        num_samples = sum(map(samples_in, own)) if self.batched else len(own)
        data = None
        if not skipped:
            data = (own or read)[0] if self.batched else self.collate_fn(own or read[:1])
            if self.workers > 1 or self.asked() is not None:
                refuse_devices(data, self.name)
        return Item(
            Kind.BATCH,
            self.worker,
            count,
            data,
            num_samples,
            len(read),
            mark_of(read[0]),
            deepcopy(self.dataset.state_dict()) if self.has_state else None,
            self.asked(),
            taken(),
        )


def is_read_once(dataset: Any) -> bool:
    """Whether a data set is an iterator whose ``__iter__`` begins nothing anew: it does no more than return it."""
    code = getattr(type(dataset).__iter__, "__code__", None)
    return hasattr(dataset, "__next__") and (code is None or code.co_code == _itself.__code__.co_code)


def _itself(self: Any) -> Any:
    return self


def _takes(dataset: Any, method: str, *arguments: Any) -> bool:
    """Whether a data set has a method that can be called so; others of that name may mean something else."""
    try:
        signature(getattr(dataset, method)).bind(*arguments)
    except (AttributeError, TypeError):  # a TypeError: it is no function, or takes other arguments
        return False
    except ValueError:
        pass  # it does not say what it takes
    return True


def _unknown() -> None:
    """Say that nobody knows: there is no data worker."""


def begin_worker(number: int) -> None:
    follow_rank(number)
    info = get_worker_info()
    assert info is not None
    cut: Any = info.dataset
    cut.worker, cut.workers = number, info.num_workers
    cut.asked = notice_numbers(cut.dataset)
    if cut.begin_worker is not None:
        cut.begin_worker(number)
        cut.asked = lambda: True  # the user's function was told


def mark_of(sample: Any) -> int:
    """Return a checksum of what tensors, arrays, numbers and texts there are in a sample."""
    found = 0
    for leaf in tree_leaves(sample):
        if isinstance(leaf, Tensor):
            leaf = leaf.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        if isinstance(leaf, (np.ndarray, bytes)):
            content = leaf.tobytes() if isinstance(leaf, np.ndarray) and leaf.dtype != object else repr(leaf).encode()
        elif isinstance(leaf, (bool, int, float, str)):
            content = repr(leaf).encode()
        else:
            content = leaf.tobytes() if callable(getattr(leaf, "tobytes", None)) else type(leaf).__name__.encode()
        found = zlib.crc32(content, found)
    return found
