"""Iterable-style data sets to batches: streams whose order is their own, and whose end shows when it is reached.

Each rank reads in its own process, or in data workers, and looks a few batches ahead. How large the next batches are on
each rank, and whether there are any, ranks tell each other before they use them: so all of them end an epoch at one
step, however unevenly the stream is dealt.
"""

import copy
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ddp_recipes._compat.torch_ import tree_map_only
from ddp_recipes.data.keyed import AS_IT_COMES, Form, collate
from ddp_recipes.data.loader import Batch, Loader
from ddp_recipes.data.one_by_one import as_it_is, in_time
from ddp_recipes.data.order import UNKNOWN, BatchPlan, Sequential
from ddp_recipes.data.reading import Cut, Item, Kind, Saved, Start, begin_worker as begin_cut
from ddp_recipes.devices import is_accelerator, locks_pages
from ddp_recipes.errors import RequestError, RunFailed
from ddp_recipes.runtime.seeding import key, seeded

MOST_AHEAD = 4  # batches that ranks exchange the sizes of at once, if a step does not take more


class Progress:
    """What ranks have told each other of an epoch.

    Attributes:
        sizes: of the shards of a batch, by its number; those of the batches before ``first`` are forgotten.
        offset: samples of the batches before ``first``.
        known: batches before this one are known.
        end: the number of batches, once that is known.
    """

    def __init__(self, start: int = 0) -> None:
        self.sizes: dict[int, Sequence[int]] = {}
        self.offset, self.first, self.known = 0, start, start
        self.end: int | None = None

    def add(self, sizes: Sequence[int]) -> None:
        self.sizes[self.known] = sizes
        self.known += 1

    def forget(self, before: int) -> None:
        """Forget what nobody asks for any more."""
        while self.first < min(before, self.known):
            self.offset += sum(self.sizes.pop(self.first))
            self.first += 1


class IterablePlan(BatchPlan):
    """The sizes of a stream's batches, as far as they are known; beyond that, what they should be."""

    progress: Progress

    def begin(self, start: int) -> None:
        """Forget an epoch; the next one begins at this batch."""
        object.__setattr__(self, "progress", Progress(start))

    @property
    def num_batches(self) -> int:
        """Global batches of the epoch; ``UNKNOWN`` as long as its end is not."""
        return UNKNOWN if self.progress.end is None else self.progress.end

    @property
    def planned_batches(self) -> float:
        """The most of an epoch, infinitely many without a limit; also once the end has come into sight."""
        return math.inf if self.max_batches is None else self.max_batches

    @property
    def same_sizes(self) -> bool:
        return self.num_shards == 1 or (self.drop_last and self.global_batch_size % self.num_shards == 0)

    def size(self, batch: int, shard: int | None = None) -> int:
        if (sizes := self.progress.sizes.get(batch)) is None:
            return super().size(0, shard)
        return sum(sizes) if shard is None else sizes[shard] if shard < self.num_shards else 0

    def positions(self, batch: int, shard: int = 0) -> Tensor:
        """Return the places of a shard's samples in the stream."""
        before = range(self.progress.first, batch)
        start = self.progress.offset + sum(sum(self.progress.sizes[number]) for number in before)
        return self._shard(torch.arange(start, start + self.size(batch)), shard)

    def indices(self, epoch: int, batch: int, shard: int = 0) -> Tensor:
        return self.positions(batch, shard)


@dataclass(frozen=True)
class Dealt:
    """Which rank reads what.

    Attributes:
        shard: of each global batch, that this rank reads; one beyond the last reads nothing.
        of_rank: the same of each rank.
        exchange: returns of numbers [n] of each rank all of them, [ranks, n]; a collective.
        shared: whether each rank reads the whole stream and keeps its share; else it gets its shard of it alone.
        rank: this one.
    """

    shard: int
    of_rank: Sequence[int]
    exchange: Callable[[Tensor], Tensor]
    shared: bool = True
    rank: int = 0


class IterableLoader(Loader):
    """Batches of an iterable-style data set as one rank sees them, behind the methods of :class:`Loader`.

    ``__iter__`` of the set begins an epoch anew, after ``set_epoch(epoch)`` where it has that. Where it has
    ``state_dict()`` and ``load_state_dict(state)``, an iterator begun after the latter goes on from that state.

    Args:
        plan: of nominal sizes.
        dealt: which rank reads what.
        batched: whether the set gives whole batches.
        begin_worker: is called in each data worker with its number, as torch's ``worker_init_fn``.
        replays: whether a resumed run reads the stream again though the set has a state.
    """

    plan: IterablePlan

    def __init__(  # noqa: PLR0913 - most of them of torch's DataLoader
        self,
        dataset: Any,
        plan: IterablePlan,
        device: torch.device,
        *,
        dealt: Dealt,
        batched: bool = False,
        num_workers: int = 0,
        pin_memory: bool = True,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        prefetch_factor: int | None = None,
        multiprocessing_context: str | None = None,
        timeout: float = 0.0,
        begin_worker: Callable[[int], None] | None = None,
        replays: bool = False,
        timeout_s: float = 1800.0,
        form: Form = AS_IT_COMES,
        name: str = "data",
    ) -> None:
        self.dataset, self.plan, self.device = dataset, plan, device
        self.shards, self.dealt = range(dealt.shard, dealt.shard + 1), dealt
        self.collate_fn, self.name, self.timeout_s, self.form = collate_fn or collate, name, timeout_s, form
        self.fetch, self.skipped = None, set()
        self.pin_memory = pin_memory and is_accelerator(device) and locks_pages()
        self._made_with: dict[str, Any] = {
            "dealt": dealt,
            "batched": batched,
            "pin_memory": pin_memory,
            "collate_fn": collate_fn,
            "begin_worker": begin_worker,
            "replays": replays,
            "timeout_s": timeout_s,
            "form": form,
            "name": name,
        }
        self._cut = Cut(
            dataset,
            BatchPlan(plan.order, plan.global_batch_size, plan.num_shards, plan.seed, plan.drop_last, plan.sharding),
            dealt.shard,
            shared=dealt.shared,
            batched=batched,
            collate_fn=self.collate_fn,
            name=name,
            begin_worker=begin_worker,
            replays=replays,
        )
        self._reader = self._read_by(
            num_workers,
            prefetch_factor=prefetch_factor,
            multiprocessing_context=multiprocessing_context,
            timeout=timeout,
        )
        self._resumes: tuple[int, int, Start] | None = None
        self.plan.begin(0)
        self._begin(iter(()), 0, Start())

    def _read_by(self, num_workers: int, **options: Any) -> "DataLoader[Item]":
        """Return what reads this rank's share, in this process or in data workers."""
        return DataLoader(
            self._cut,
            batch_size=None,
            generator=torch.Generator(),  # its iterators draw from it, which must not shift what a step draws from
            num_workers=num_workers,
            pin_memory=self.pin_memory and num_workers > 0,
            collate_fn=as_it_is,
            worker_init_fn=begin_cut,
            **options,
        )

    # What the run asks for.

    @property
    def is_even(self) -> bool:
        return self.plan.num_shards == 1 or self.plan.drop_last

    @property
    def in_words(self) -> str:
        return f"a stream in batches of {self.plan.global_batch_size:,} over {self.plan.num_shards} ranks"

    @property
    def length(self) -> str:
        return f"a stream, {type(self.dataset).__name__}, up to its end"

    @property
    def promises(self) -> str:
        """What holds for a stream, and what does not, in words."""
        ranks, workers = self.plan.num_shards, max(1, self._reader.num_workers)
        read = "the whole of it and keeps its share" if self.dealt.shared else "a shard of its own"
        several = f"Each of {ranks} ranks reads {read}. " if ranks > 1 else ""
        if self._cut.has_state:
            resume = (
                "A resumed run goes on from the state that its state_dict() gave (data.replay=true: it reads the set "
                "again up to where it was, as where a state lacks what a shuffle holds)"
            )
        else:
            resume = "A resumed run reads it again up to where it was, which is exact if it comes alike each time"
        numbers = [*([] if self.dealt.shared else [f"{ranks} ranks"]), f"data.num_workers={self._reader.num_workers}"]
        bound = f", with {' and '.join(numbers)} as before" if not self.dealt.shared or workers > 1 else ""
        return (
            f"an iterable-style set, whose order and end are its own (data.shuffle changes nothing). "
            f"{several}{resume}{bound}."
        )

    def batches(self, epoch: int, start: int = 0, group: int = 1) -> Iterator[Batch]:
        """Return an iterator over an epoch's batches from number ``start`` on. All ranks iterate alike."""
        self.close()
        begin = Start(epoch, start)
        if self._resumes is not None and self._resumes[:2] == (epoch, start):
            begin = self._resumes[2]
        self._resumes, self._cut.start = None, begin
        # Here, not in data workers: Hugging Face's sets share the number with them, and each would add to it.
        if callable(set_epoch := getattr(self.dataset, "set_epoch", None)):
            set_epoch(epoch)
        reader = self._reader
        self._begin(in_time(reader, self.name, self.timeout_s) if reader.num_workers else iter(reader), start, begin)
        return self._each(start)

    def _begin(self, items: Iterator[Item], start: int, begin: Start) -> None:
        """Begin with an epoch, of which nothing is read yet."""
        self.plan.begin(start)
        self._items: Iterator[Item] = items
        self._skip = 0 if begin.workers else start
        self._queue: deque[Item] = deque()  # read, and not used
        self._told: deque[list[int]] = deque()  # of what is read what other ranks do not know yet
        self._over, self._last, self._window = False, None, 1
        self._turn = begin.turn
        self._asked: bool | None = None
        self._saved = list(begin.workers)

    def _each(self, number: int) -> Iterator[Batch]:
        shard = self.shards[0]
        while self.ahead(number, 1):
            num_samples = self.plan.size(number, shard)
            data = self._next_data(num_samples)
            yield Batch(self._moved(data), num_samples, number, shard)
            number += 1
            self._read_ahead()

    def _next_data(self, num_samples: int) -> Any:
        """Return what is in the next batch; where this rank has nothing more, what was in one before."""
        while self._queue and self._queue[0].kind is Kind.END:
            self._track(self._queue.popleft())
        if self._queue:
            item = self._queue.popleft()
            self._track(item)
            self._last = item.data
        elif self._last is None:
            first = self._first()
            self._last = first if self._cut.batched else self.collate_fn([first])
        return self._last

    def ahead(self, start: int, count: int) -> range:
        """Return the numbers of at most so many batches from ``start`` on that the epoch has. A collective.

        Raises:
            RunFailed: there is none at the beginning, or ranks do not read what they should.
        """
        progress = self.plan.progress
        progress.forget(start)
        while progress.end is None and progress.known <= start + count:
            self._exchange(start + count + 1 - progress.known)
        return range(start, min(start + count, self.plan.num_batches))

    def limited(self, max_batches: int) -> "IterableLoader":
        """Return the same loader cut off after so many batches an epoch, without data workers."""
        most = max_batches if self.plan.max_batches is None else min(max_batches, self.plan.max_batches)
        loader = IterableLoader(self.dataset, replace(self.plan, max_batches=most), self.device, **self._made_with)
        loader.moves = self.moves
        return loader

    def apart(self) -> "IterableLoader":
        """Return the same loader once more, which exchanges nothing with other ranks."""
        alone = replace(self.dealt, exchange=lambda mine: mine[None], of_rank=[self.dealt.shard], rank=0)
        options = {**self._made_with, "dealt": alone}
        return IterableLoader(self.dataset, replace(self.plan), self.device, **options)

    def recut(self, global_batch_size: int) -> Loader:
        """Refuse: tools that try sizes out ask how many samples there are."""
        raise RequestError(f"{self.name} is an iterable-style set, of which batches cannot be cut anew.")

    def _of_first(self) -> Callable[[int], Any]:
        """Return what makes batches of so many times the first sample, or of rows of the set's first batch."""
        first = self._first()
        if not self._cut.batched:
            return lambda count: self.collate_fn([copy.deepcopy(first) for _ in range(count)])

        def rows(count: int) -> Any:
            at = torch.arange(count)
            return tree_map_only(Tensor, lambda each: each[at % len(each)] if each.dim() else each, first)

        return rows

    def _first(self) -> Any:
        """Return the first that the set gives."""
        with seeded(key(self.plan.seed, 0, 0, 0)):
            for first in cast(Any, self.dataset):
                return first
        raise RunFailed(
            f"Rank {self.dealt.rank} gets no sample at all of {self.name}, on which its model could run along. Use "
            f"fewer ranks, or more shards."
        )

    def close(self) -> None:
        """Stop reading, and end the data workers."""
        if hasattr(self._items, "close"):
            self._items.close()
        self._items, self._over = iter(()), True
        self._queue.clear()

    # Reading ahead.

    def _read_ahead(self) -> None:
        """Read a batch more of those that ranks exchange the sizes of next: all at once, a step would wait for them."""
        beyond = len(self._told) + 1
        planned = self.plan.planned_batches - self.plan.progress.known
        if len(self.dealt.of_rank) > 1 and beyond <= min(self._window, planned) and self.plan.progress.end is None:
            self._read(beyond)

    def _exchange(self, count: int) -> None:
        """Read as many batches ahead, at least, and have ranks tell each other how large they are."""
        plan, progress, dealt = self.plan, self.plan.progress, self.dealt
        if len(dealt.of_rank) > 1:
            count = max(count, self._window)
            self._window = min(2 * self._window, MOST_AHEAD)
        if plan.max_batches is not None:
            count = min(count, plan.max_batches - progress.known)
        if count <= 0:
            progress.end = progress.known
            return
        self._read(count)
        rows = [self._told.popleft() if self._told else [0, 0, 0] for _ in range(count)]
        every = [rows]
        if len(dealt.of_rank) > 1:  # a wait for the device
            every = dealt.exchange(torch.tensor(rows, device=self.device)).tolist()
        if progress.known == 0:
            self._refuse_repetition(every)
        for place in range(count):
            of_ranks = [row[place] for row in every]
            of_shard = dict(zip(dealt.of_rank, of_ranks, strict=True))
            sizes = [of_shard[shard][0] if shard in of_shard else 0 for shard in range(plan.num_shards)]
            full = all(sizes) if self._cut.batched else sum(sizes) >= plan.global_batch_size
            dropped = plan.drop_last and not dealt.shared and len(of_shard) == plan.num_shards and not full
            if dropped or not any(total for _, total, _ in of_ranks):
                progress.end = progress.known
                break
            self._compare(of_ranks, progress.known)
            progress.add(sizes)
        if progress.end is not None and progress.known == progress.first:
            after = f" after batch {progress.first}, and the run was there" if progress.first else ""
            raise RunFailed(
                f"{self.name}, a {type(self.dataset).__name__}, gives no batch{after}. Each call of its __iter__ has "
                f"to begin an epoch anew; data.drop_last=true drops what does not fill a global batch."
            )

    def _refuse_repetition(self, every: Sequence[Sequence[Sequence[int]]]) -> None:
        """Refuse streams that are all the same, as far as the first batches show, where each rank uses all of its."""
        first = dict(zip(self.dealt.of_rank, every, strict=True))
        if not self.dealt.shared and len(first) > 1 and all(rows == every[0] for rows in first.values()):
            raise RunFailed(
                f"{self.name}, a {type(self.dataset).__name__}, gives all ranks the same samples, though "
                f"data.shard_arguments says that each gets others: each sample would count {len(first)} times. Leave "
                f"data.shard_arguments out, and each rank keeps its share; or have the set deal what it reads."
            )

    def _read(self, count: int) -> None:
        """Read until there are so many batches that other ranks do not know of, or the stream ends."""
        while not self._over and len(self._told) < count:
            item = next(self._items, None)
            if item is None:
                self._over = True
            elif item.kind is Kind.BATCH and self._skip:
                self._skip -= 1
                self._track(item)
            elif item.kind is Kind.BATCH:
                self._queue.append(item)
                self._told.append([item.num_samples, item.total, item.mark])
            elif item.kind is Kind.END:
                self._queue.append(item)

    def _compare(self, of_ranks: Sequence[Sequence[int]], number: int) -> None:
        """Refuse streams that differ where they must not: of ranks with one shard, of all where they share one."""
        first: dict[int, tuple[int, Sequence[int]]] = {}
        for rank, (shard, row) in enumerate(zip(self.dealt.of_rank, of_ranks, strict=True)):
            seen = row[1:] if self.dealt.shared else row
            other, expected = first.setdefault(0 if self.dealt.shared else shard, (rank, seen))
            if seen != expected:
                raise RunFailed(
                    f"{self.name}, a {type(self.dataset).__name__}, gives other samples on rank {rank} than on rank "
                    f"{other} (batch {number}), and each keeps a share of what should be one stream. If the set gives "
                    f"each rank a part by itself, set data.shard_arguments=own; if it can, say how with "
                    f"data.shard_arguments; if it draws at random, seed what it draws from."
                )

    # Where a run goes on.

    def _track(self, item: Item) -> None:
        """Note that an item is used."""
        while len(self._saved) <= item.worker:
            self._saved.append(Saved())
        self.skipped.update(item.skipped)
        if item.kind is Kind.END:
            self._saved[item.worker] = self._saved[item.worker]._replace(ended=True)
        else:
            self._saved[item.worker] = Saved(item.number + 1, item.state)
            self._turn, self._asked = (item.worker + 1) % max(1, self._reader.num_workers), item.asked

    @property
    def _cut_as(self) -> dict[str, Any]:
        """What another run has to have alike: ranks that read a shard or take a whole batch each, and data workers."""
        workers = max(1, self._reader.num_workers)
        return {
            "shards": 1 if self.dealt.shared and not self._cut.batched else self.plan.num_shards,
            "workers": 1 if self._asked is False else workers,
            "asked": self._asked,
        }

    def state(self, gather: Callable[[Any], list[Any] | None] | None) -> dict[str, Any] | None:
        """Return how the stream is cut, and, where the set has a state, that of each rank's."""
        while self._queue and self._queue[0].kind is Kind.END:
            self._track(self._queue.popleft())
        ranks = None
        if self._cut.has_state and gather is not None:
            ranks = gather({"workers": [list(each) for each in self._saved], "turn": self._turn})
        return {**self._cut_as, "end": self.plan.progress.end, "ranks": ranks}

    def load_state(self, state: Mapping[str, Any] | None, epoch: int, batch: int) -> None:
        """Go on from a state, where it is one of this very epoch; else the stream is read again up to there."""
        self._resumes = None
        if not state:
            return
        if batch == 0:  # of the epoch before, whose validation may be still to come
            self.plan.progress.end = state["end"]
        elif self._cut.has_state and state["ranks"] and self._goes_on(state):
            own = state["ranks"][0 if self.dealt.shared else self.dealt.rank]
            workers = [Saved(*each) for each in own["workers"]]
            self._resumes = epoch, batch, Start(epoch, batch, workers, own["turn"])

    def _goes_on(self, state: Mapping[str, Any]) -> bool:
        mine = self._cut_as
        alike = state["workers"] == mine["workers"] or state["asked"] is False
        return bool(state["shards"] == mine["shards"] and alike)

    def check_state(self, path: object, state: Mapping[str, Any] | None, strict: bool) -> None:
        """Refuse a state of another number of shards or workers, where these change the batches.

        Raises:
            RequestError: with what to set.
        """
        if state and strict and not self._goes_on(state):
            each = "take a whole batch each" if self._cut.batched and self.dealt.shared else "read a shard each"
            ranks = f"{state['shards']} rank(s) that {each}" if state["shards"] > 1 else "one shared stream"
            raise RequestError(
                f"{path} is of a run whose {self.name} was {ranks} with data.num_workers={state['workers']}: this "
                f"run's batches would be others. Use as many, or resume.strict=false to go on as nearly as can be."
            )


def nominal(global_batch_size: int, num_shards: int, seed: int, drop_last: bool, sharding: str) -> IterablePlan:
    """Return the plan of a stream of which nothing is known yet."""
    return IterablePlan(Sequential(UNKNOWN), global_batch_size, num_shards, seed, drop_last, sharding)
