"""Data sets to batches on one rank: whole batches where the set allows it, a DataLoader where it does not."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import repeat
from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from ddp_recipes._compat.torch_ import shut_down, tree_flatten, tree_map_only
from ddp_recipes.data.keyed import (
    ALIGNED,
    AS_IT_COMES,
    Draw,
    Fetched,
    Form,
    collate,
    fetched,
    gives_batches,
    may_skip,
    of_several,
    to_device,
)
from ddp_recipes.data.order import BatchPlan
from ddp_recipes.datasets.memory import InMemory
from ddp_recipes.datasets.transforms import is_known
from ddp_recipes.devices import is_accelerator, locks_pages
from ddp_recipes.errors import RequestError
from ddp_recipes.runtime.tensors import is_dense

if TYPE_CHECKING:
    from ddp_recipes.data.one_by_one import KeyedDataset

Rows = tuple[Tensor, ...]
"""Of some samples: inputs ``[n, ...]``, targets ``[n, ...]``, and so on."""

CHUNK_BYTES = 8 << 20  # fetched in one go, about
MAX_BATCHES = 64  # likewise
GROWTH = 16  # an epoch begins with fewer, so that its second step does not wait long


class Prefetcher:
    """Fetches several batches in one go before they are needed, and cuts them apart.

    Args:
        fetch: returns the rows of samples, int64 ``[n]``; those of each follow from itself alone.
        pin: whether to pin them in memory, from which a GPU fetches by itself.
    """

    def __init__(self, fetch: Callable[[Tensor], Rows], pin: bool) -> None:
        self._fetch = fetch
        self._pin = pin
        self._thread = ThreadPoolExecutor(1, "prefetch")

    def batches(self, samples: Callable[[int], Tensor]) -> Iterator[Rows]:
        """Yield the rows of each batch.

        Args:
            samples: returns those of the next so many batches, or of fewer: int64 ``[batches, n]``. There is at least
                one, and none at the end.
        """
        rows = self._rows(samples(1)[0])
        size, bytes_a_row = len(rows[0]), [tensor[:1].nbytes for tensor in rows]
        padding = -size % math.lcm(*(ALIGNED // math.gcd(ALIGNED, count) for count in bytes_a_row))
        most = max(1, min(MAX_BATCHES, CHUNK_BYTES // max(1, (size + padding) * sum(bytes_a_row))))
        count = min(GROWTH, most)
        pending = self._submit(samples(count), padding)
        yield rows
        del rows  # or it would stay to the end
        while pending is not None:
            fetched = pending
            count = min(GROWTH * count, most)
            pending = self._submit(samples(count), padding)
            yield from fetched.result()

    def _submit(self, batches: Tensor, padding: int) -> "Future[list[Rows]] | None":
        return self._thread.submit(self._chunk, batches, padding) if len(batches) else None

    def _chunk(self, batches: Tensor, padding: int) -> list[Rows]:
        """Return the rows of each batch; what pads them in between lets each begin where a tensor would."""
        size = batches.shape[1]
        rows = self._rows(pad(batches, (0, padding)).flatten())
        columns = (each.view(-1, size + padding, *each.shape[1:])[:, :size].unbind() for each in rows)
        return list(zip(*columns, strict=True))

    def _rows(self, samples: Tensor) -> Rows:
        rows = self._fetch(samples)
        return tuple(tensor.pin_memory() for tensor in rows) if self._pin else rows

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(cancel_futures=True)


class Batch(NamedTuple):
    """A shard of a global batch.

    Where it has no samples the data hold one that must not count: its rank still has to take part in the all-reduce.
    """

    data: Any  # what the task's step takes, usually (inputs, targets), on the replica's first device
    num_samples: int
    number: int = 0  # of the global batch in its epoch
    shard: int = 0  # of the global batch


class Loader:
    """Batches of one data set as one rank sees them.

    Args:
        dataset: map-style. Where it has ``fetch(indices) -> batch`` and a true ``batched``, or is a ``TensorDataset``
            without a ``collate_fn``, a batch is fetched as a whole; else sample by sample by torch's ``DataLoader``.
        shards: those of each global batch that this rank gets, one after the other.
        num_workers: and what follows, as in ``DataLoader``, for samples that are fetched one by one.
        collate_fn: makes a batch of samples; torch's own for ``None``.
        persistent_workers: ``None``: where there are workers.
        timeout_s: the run ends where data workers give no batch for longer.
        begin_worker: is called in each data worker with its number, as torch's ``worker_init_fn``.
        form: that batches come in.
        name: of the data set in messages.

    Attributes:
        skipped: names of samples that data sets have left out of the batches that were used, on this rank.
        moves: whether batches come on the device; else as they are fetched, for the task to move them.

    Raises:
        RequestError: there is no batch, or a ``collate_fn`` that would not be called.
    """

    moves = True

    def __init__(  # noqa: PLR0913 - data's keys, most of them of torch's DataLoader
        self,
        dataset: Dataset[Any],
        plan: BatchPlan,
        device: torch.device,
        *,
        shards: range = range(1),
        num_workers: int = 0,
        pin_memory: bool = True,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        persistent_workers: bool | None = None,
        prefetch_factor: int | None = None,
        multiprocessing_context: str | None = None,
        timeout: float = 0.0,
        timeout_s: float = 1800.0,
        begin_worker: Callable[[int], None] | None = None,
        form: Form = AS_IT_COMES,
        name: str = "data",
    ) -> None:
        if plan.num_batches == 0:
            raise _without_batch(plan, "batch_size" if name == "data.train" else "val_batch_size")
        self.dataset, self.plan, self.device, self.shards = dataset, plan, device, shards
        self.collate_fn, self.name, self.timeout_s, self.form = collate_fn or collate, name, timeout_s, form
        self._options: dict[str, Any] = {"pin_memory": pin_memory, "collate_fn": collate_fn, "form": form, "name": name}
        self._workers: dict[str, Any] = {
            "num_workers": num_workers,
            "persistent_workers": persistent_workers,
            "prefetch_factor": prefetch_factor,
            "multiprocessing_context": multiprocessing_context,
            "timeout": timeout,
            "timeout_s": timeout_s,
            "begin_worker": begin_worker,
        }
        self.skipped: set[str] = set()
        self.fetch = _whole_batch_fetch(dataset, collate_fn)
        self.pin_memory = pin_memory and is_accelerator(device) and locks_pages()
        self._sampler = _PlanSampler(plan, shards)
        prefetches = self.fetch is not None and plan.uniform and _may_prefetch(dataset)
        self._prefetcher = Prefetcher(self.fetch, self.pin_memory) if prefetches else None
        self._one_by_one: DataLoader[Any] | None = None
        if self.fetch is not None and collate_fn is not None:
            raise RequestError(
                f"data.collate_fn makes a batch of samples, but {name}, a {type(dataset).__name__}, gives whole "
                f"batches. Leave it out and do the same in the model or the task, or give a data set without `batched`."
            )
        if self.fetch is None:
            from ddp_recipes.data.one_by_one import sample_loader

            self._one_by_one = sample_loader(
                self._keyed(),
                self._sampler,
                begin_worker,
                num_workers=num_workers,
                pin_memory=self.pin_memory and num_workers > 0,  # else it is done with what is not on a device already
                persistent_workers=num_workers > 0 if persistent_workers is None else persistent_workers,
                prefetch_factor=prefetch_factor,
                multiprocessing_context=multiprocessing_context,
                timeout=timeout,
            )

    def __len__(self) -> int:
        """Number of batches an epoch, the same on every rank."""
        return self.plan.num_batches

    @property
    def is_even(self) -> bool:
        """Whether all ranks have equally many batches with a sample in them."""
        return self.plan.is_even

    @property
    def in_words(self) -> str:
        """What is cut into which batches."""
        plan = self.plan
        return f"{plan.num_samples:,} samples in batches of {plan.global_batch_size:,} over {plan.num_shards} ranks"

    @property
    def promises(self) -> str:
        """What a user has to know of the order of samples, in words."""
        return ""

    @property
    def length(self) -> str:
        """How long an epoch is, in words."""
        return f"{self.plan.num_samples:,} samples, {len(self):,} batches an epoch"

    def ahead(self, start: int, count: int) -> range:
        """Return the numbers of at most so many batches from ``start`` on that the epoch has.

        A collective where ranks have to find out. The sizes of these batches are known afterwards.
        """
        return range(start, min(start + count, self.plan.num_batches))

    def batches(self, epoch: int, start: int = 0, group: int = 1) -> Iterator[Batch]:
        """Return an iterator over an epoch's batches from number ``start`` on, shard by shard.

        Args:
            group: so many batches belong together: all of them come for one shard, then all of them for the next.
        """
        self.plan.enter(epoch)
        return self._batches(epoch, start, group)

    def _batches(self, epoch: int, start: int, group: int) -> Iterator[Batch]:
        self._sampler.position = epoch, start, group
        for (number, shard), data in zip(self._sampler.turns(), self._loaded(epoch, start), strict=False):
            size = self.plan.size(number, shard)
            if isinstance(data, Fetched):
                if data.skipped and size:
                    self.skipped.update(data.skipped)
                data = data.data
            yield Batch(self._moved(data), size, number, shard)

    def _moved(self, data: Any) -> Any:
        """Return a batch on the device, in the form that the model takes it in."""
        elsewhere = self.moves and is_accelerator(self.device)
        return self.form.of(to_device(data, self.device, self.pin_memory) if elsewhere else data)

    def _loaded(self, epoch: int, start: int) -> Iterator[Any]:
        """Yield what is in each batch, in the sampler's order."""
        if self._one_by_one is not None:
            keyed: Any = self._one_by_one.dataset
            if self._one_by_one.num_workers:
                from ddp_recipes.data.one_by_one import in_time

                return in_time(self._one_by_one, self.name, self.timeout_s)
            return map(keyed.__getitems__, self._sampler)  # as torch's own iterator, which takes its time for it
        if self._prefetcher is not None and len(self.shards) == 1:
            return self._prefetched(self._prefetcher, epoch, start)
        samples = (self._sampler.indices(epoch, number, shard) for number, shard in self._sampler.turns())
        return map(partial(fetched, self.fetch), samples)

    def _prefetched(self, prefetcher: Prefetcher, epoch: int, start: int) -> Iterator[Any]:
        """Yield the batches with those ahead being fetched; the last, which may be smaller, is fetched by itself."""
        plan, (shard,) = self.plan, self.shards
        last = plan.num_batches - 1

        def samples(count: int) -> torch.Tensor:
            nonlocal start
            found = plan.indices_of(epoch, range(start, min(start + count, last)), shard)
            start += len(found)
            return found

        if start < last and plan.size(0, shard):
            yield from prefetcher.batches(samples)
        while start <= last:
            yield self.fetch(self._sampler.indices(epoch, start, shard))
            start += 1

    def close(self) -> None:
        """End the data workers now. At the interpreter's end each one would be waited for, for up to five seconds."""
        if self._prefetcher is not None:
            self._prefetcher.close()
        shut_down(self._one_by_one)

    def limited(self, max_batches: int) -> "Loader":
        """Return this loader cut off after so many batches an epoch; for whole-batch data sets and first looks."""
        plan = self.plan.limited(min(max_batches, len(self)))
        loader = Loader(self.dataset, plan, self.device, shards=self.shards, **self._options)
        loader.moves = self.moves
        return loader

    def apart(self) -> "Loader":
        """Return the same loader once more, for whoever iterates beside the run, on any rank alone."""
        return self.limited(len(self))

    def state(self, gather: Callable[[Any], list[Any] | None] | None) -> dict[str, Any] | None:
        """Return what of this rank's place in the data does not follow from the cursor: nothing.

        Args:
            gather: returns every rank's value on rank 0, a collective; ``None`` where there can be none.
        """
        return None

    def load_state(self, state: Mapping[str, Any] | None, epoch: int, batch: int) -> None:
        """Take what :meth:`state` returned after so many batches of an epoch."""

    def check_state(self, path: object, state: Mapping[str, Any] | None, strict: bool) -> None:
        """Refuse a state from which this loader would not go on; ``strict`` as in ``resume.strict``.

        Raises:
            RequestError: with what to set.
        """

    @property
    def may_skip(self) -> bool:
        """Whether its data set may leave samples out."""
        return may_skip(self.dataset)

    def recut(self, global_batch_size: int) -> "Loader":
        """Return a loader of these samples in whole batches of another size."""
        plan = replace(self.plan, global_batch_size=global_batch_size, max_batches=None)
        return Loader(self.dataset, plan, self.device, shards=self.shards, **self._options, **self._workers)

    def sample(self, size: int = 1) -> Any:
        """Return a batch of so many times the first sample, on the device: for the model graph and for dry runs.

        It takes the memory of one sample, unless a ``collate_fn`` makes something else than rows of samples.
        """
        make = self._of_first()
        return _of_rows(lambda count: self.form.of(to_device(make(count), self.device)), size)

    def _of_first(self) -> Callable[[int], Any]:
        """Return what makes batches of so many times the first sample."""
        if self.fetch is not None:
            fetch = self.fetch
            return lambda count: fetch(torch.zeros(count, dtype=torch.int64))
        keyed = self._keyed()
        return lambda count: keyed.__getitems__([Draw(0, 0, 0)] * count).data

    def _keyed(self) -> "KeyedDataset":
        """Return the data set as one whose samples are fetched one by one."""
        from ddp_recipes.data.one_by_one import KeyedDataset

        return KeyedDataset(self.dataset, self.plan.seed, self.name, self.collate_fn)


def _of_rows(make: Callable[[int], Any], size: int) -> Any:
    """Return ``make(size)``, where two samples make two rows with the rows being one and the same."""
    one = make(1)
    if size == 1:
        return one
    (leaves, form), (of_two, form_of_two) = tree_flatten(one), tree_flatten(make(2))
    if form != form_of_two or not all(map(_is_row, leaves, of_two)):
        return make(size)
    return tree_map_only(Tensor, lambda row: row.expand(size, *row.shape[1:]) if row.dim() else row, one)


def _is_row(of_one: Any, of_two: Any) -> bool:
    """Whether what a sample has in a batch is a row of what two have there, or the same for any number of them."""
    if not isinstance(of_one, Tensor):
        return isinstance(of_one, (int, float, str, NoneType)) and bool(of_one == of_two)
    if not (isinstance(of_two, Tensor) and is_dense(of_one) and is_dense(of_two)):
        return False
    return of_two.shape == ((2, *of_one.shape[1:]) if of_one.shape[:1] == (1,) else ())


def is_iterable(dataset: Any) -> bool:
    """Whether a data set can only be read in its own order, as torch's ``IterableDataset``."""
    by_index = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    return isinstance(dataset, IterableDataset) or (hasattr(dataset, "__iter__") and not by_index)


def size_of(dataset: Any) -> int:
    """Return the number of samples of a map-style data set."""
    kind = type(dataset).__name__
    if is_iterable(dataset):
        raise RequestError(
            f"{kind} can only be read in its own order, and samples are taken by their numbers here. Give a set that "
            f"has __len__ and __getitem__(index)."
        )
    if not hasattr(dataset, "__len__"):
        raise RequestError(f"{kind} is no data set. Give one that has __len__ and __getitem__(index), or __iter__.")
    if isinstance(dataset, Mapping) and dataset and 0 not in dataset:
        names = [*map(str, dataset)]
        raise RequestError(
            f"{kind} is no data set, but holds {len(names)} by name: {', '.join(names[:8])}. Give one of them, by an "
            f"argument such as split: {names[0]} where there is one, or by a function of your own."
        )
    if hasattr(dataset, "iloc") and hasattr(dataset, "columns"):  # of pandas, whose [0] is a column
        raise RequestError(
            f"{kind} is no data set: its [index] is a column. Give its rows, such as to_dict('records'), by a function "
            f"of your own, or the file that it is read from by data=csv or data=stream."
        )
    if len(dataset) == 0:
        raise RequestError(f"{kind} is empty: give it at least one sample.")
    return len(dataset)


def _without_batch(plan: BatchPlan, key: str) -> RequestError:
    return RequestError(
        f"No batch to run: {plan.num_samples} samples, a global batch of {plan.global_batch_size}"
        f"{', the rest dropped' if plan.drop_last else ''}, at most {plan.max_batches} batches. Use a smaller "
        f"data.{key}, data.drop_last=false, or a higher trainer.limit_*_batches."
    )


def _whole_batch_fetch(dataset: Any, collate_fn: Any) -> Any:
    if gives_batches(dataset) and (fetch := of_several(dataset, "fetch")) is not None:
        return fetch
    return partial(_rows, dataset.tensors) if type(dataset) is TensorDataset and collate_fn is None else None


def _rows(tensors: Rows, indices: Tensor) -> Rows:
    """Return some rows of tensors, wherever they are: an accelerator fetches which by itself, and no step waits."""
    places = {each.device for each in tensors}
    there = {place: to_device(indices, place, pin=is_accelerator(place) and locks_pages()) for place in places}
    return tuple(each.index_select(0, there[each.device]) for each in tensors)


def skipped_of(loaders: Iterable[Loader]) -> list[str]:
    """Return the names of the samples that data sets have left out of the batches that this rank used."""
    return sorted(set[str]().union(*(loader.skipped for loader in loaders)))


def _may_prefetch(dataset: Any) -> bool:
    """Whether many batches can be fetched in one go, on another thread: each sample's rows follow from it alone.

    What a user's own ``fetch`` or ``batched`` transform does is not known: it may draw random numbers. What is on an
    accelerator already needs no thread.
    """
    if type(dataset) is TensorDataset:
        return all(tensor.is_cpu for tensor in dataset.tensors)
    return type(dataset) is InMemory and is_known(dataset.transform)


class _PlanSampler:
    """The plan as a batch sampler: one list of draws a batch; never an empty one."""

    def __init__(self, plan: BatchPlan, shards: range) -> None:
        self.plan, self.shards = plan, shards
        self.position = 0, 0, 1  # epoch, first batch and batches in a group, for whoever begins to iterate

    def __len__(self) -> int:
        return (self.plan.num_batches - self.position[1]) * len(self.shards)

    def turns(self) -> Iterator[tuple[int, int]]:
        """Yield (batch, shard) in the order in which they come."""
        _, start, group = self.position
        for first in range(start, self.plan.num_batches, group):
            for shard in self.shards:
                for batch in range(first, min(first + group, self.plan.num_batches)):
                    yield batch, shard

    def indices(self, epoch: int, batch: int, shard: int) -> torch.Tensor:
        return _not_empty(self.plan.indices(epoch, batch, shard))

    def __iter__(self) -> Iterator[list[Draw]]:
        epoch, _, _ = self.position
        for batch, shard in self.turns():
            indices = self.indices(epoch, batch, shard).tolist()
            numbers = _not_empty(self.plan.positions(batch, shard)).tolist() if self.plan.repeats else indices
            yield list(map(Draw, indices, repeat(epoch), numbers))


def _not_empty(indices: torch.Tensor) -> torch.Tensor:
    return indices if len(indices) else torch.zeros(1, dtype=torch.int64)
