"""Samples that are fetched one by one, in this process or in data workers, and put together to batches."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess, parent_process
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, Subset, default_collate, get_worker_info

from ddp_recipes._compat.torch_ import persistent, tree_leaves, workers_of
from ddp_recipes.data.keyed import ALIGNED, Draw, Fetched, collate, fetched, of_several
from ddp_recipes.devices import is_accelerator
from ddp_recipes.errors import RunFailed
from ddp_recipes.runtime.job import ASKS_TO_STOP
from ddp_recipes.runtime.process import die_with_parent, garbage_left, ignore_once, is_stopped
from ddp_recipes.runtime.seeding import (
    Twins,
    are_rng_states,
    key,
    restored,
    rng_states,
    seed_cpu,
    seeded,
    set_rng_states,
)

LARGE = 32 << 20  # bytes of a batch: glibc gives so much back when it is freed, and the system fills it with zeros anew
_AT_A_TIME = 2  # batches: the one that is used, and the next


class Stack:
    """Stacks samples as ``default_collate`` does; a large batch in the memory of an earlier one that nobody has now.

    With 64 images of 224 x 224 taking new memory is a quarter of what decoding them takes.
    """

    def __init__(self) -> None:
        self._buffers: list[NDArray[np.uint8]] = []

    def __call__(self, samples: list[Any]) -> Any:
        first = samples[0]
        large = type(first) is torch.Tensor and first.is_cpu and first.nbytes * len(samples) >= LARGE
        alike = large and all(
            type(each) is torch.Tensor and each.is_cpu and (each.shape, each.dtype) == (first.shape, first.dtype)
            for each in samples
        )
        if not alike or get_worker_info() is not None or any(each.requires_grad for each in samples):
            return default_collate(samples)  # a data worker's are in memory that it shares
        into = torch.from_numpy(self._memory(first.nbytes * len(samples))).view(first.dtype)
        return torch.stack(samples, out=into.view(len(samples), *first.shape))

    def _memory(self, size: int) -> NDArray[np.uint8]:
        for buffer in self._buffers:
            if buffer.nbytes == size + ALIGNED and sys.getrefcount(buffer) == _UNUSED:
                break
        else:
            buffer = np.empty(size + ALIGNED, dtype=np.uint8)
            self._buffers = [buffer, *self._buffers][:_AT_A_TIME]
        start = -buffer.ctypes.data % ALIGNED
        return buffer[start : start + size]  # which holds the buffer, as tensors hold it


_UNUSED = 3  # references, of the list, a variable and the call that counts them


class KeyedDataset(Dataset[Any]):
    """Draws what a sample's random transforms draw from (seed, epoch, sample): the same in any worker of any rank.

    A ``__getitems__`` of the data set fetches a batch at once as long as it draws nothing: what it gives is then what
    each sample by itself would be. Where it draws, samples are fetched again, each with numbers of its own. So is one
    that is the first to draw from ``random`` or NumPy, which are seeded from there on.

    A ``set_epoch`` of the data set is called with the epoch before each batch, in whichever process fetches it.

    Args:
        collate_fn: makes a batch of samples, with random numbers keyed by (seed, epoch, first sample).
    """

    def __init__(self, dataset: Any, seed: int, name: str, collate_fn: Callable[[list[Any]], Any]) -> None:
        self.dataset, self.seed, self.name, self.collate_fn = dataset, seed, name, collate_fn
        self._at_once = callable(of_several(dataset, "__getitems__"))
        self._set_epoch = getattr(dataset, "set_epoch", None)
        self._stack = Stack()
        self._twins: Twins | None = Twins()  # until a sample has drawn from random or NumPy

    def __getitems__(self, draws: Sequence[Draw]) -> Fetched:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # as in a data worker: sums on several threads have other bits
        try:
            if callable(self._set_epoch):
                self._set_epoch(draws[0].epoch)
            batch = fetched(self._batch, draws)
            if get_worker_info() is not None:
                refuse_devices(batch.data, self.name)
            return batch
        finally:
            torch.set_num_threads(threads)

    def _batch(self, draws: Sequence[Draw]) -> Any:
        samples = self._fetched_at_once(draws) if self._at_once else None
        if samples is None:
            with restored():
                if self._twins is not None:
                    self._twins.settle(0)
                samples = [self._sample(draw) for draw in draws]
        if self.collate_fn is collate:
            return collate(samples, self._stack)
        with seeded(key(self.seed, draws[0].epoch, draws[0].number, 0)):  # not what the first sample has drawn
            return self.collate_fn(samples)

    def _fetched_at_once(self, draws: Sequence[Draw]) -> list[Any] | None:
        before = rng_states()
        try:
            samples: list[Any] = self.dataset.__getitems__([draw.sample for draw in draws])
            self._at_once = are_rng_states(before)
        except Exception:  # noqa: BLE001 - one by one it is raised again, and by which sample is known then
            self._at_once = False
        if self._at_once:
            return samples
        set_rng_states(before)
        return None

    def _sample(self, draw: Draw) -> Any:
        """Return a sample. It leaves the generators seeded: the batch puts them back once."""
        value = key(self.seed, draw.epoch, draw.number)
        if self._twins is None:
            seed_cpu(value)
        else:
            torch.default_generator.manual_seed(value)
        try:
            sample = self.dataset[draw.sample]
        except Exception as error:
            if self._has_drawn():
                return self._sample(draw)
            file = file_of(self.dataset, draw.sample)
            error.add_note(
                f"{type(error).__name__} of sample {draw.sample} of {self.name}, a {type(self.dataset).__name__} "
                f"of {len(self.dataset)}{'' if file is None else f', the file {file}'}: {error}"
            )
            raise
        return self._sample(draw) if self._has_drawn() else sample

    def _has_drawn(self) -> bool:
        """Whether a sample has drawn from ``random`` or NumPy, as the first one."""
        if self._twins is None or not self._twins.differ():
            return False
        self._twins = None
        return True


def refuse_devices(batch: Any, name: str) -> None:
    """Refuse what a data worker cannot give to its rank."""
    places = {each.device for each in tree_leaves(batch) if isinstance(each, torch.Tensor)}
    if found := next((place for place in places if is_accelerator(place)), None):
        raise RuntimeError(
            f"{name} gives tensors on {found} in a data worker, and devices are for the rank's own process. Set "
            f"data.num_workers=0, or give tensors on the CPU: each batch is moved to the rank's device."
        )


def file_of(dataset: Any, sample: int) -> str | None:
    """Return the file that a sample is read from, where a data set lists its files as torchvision's and ours do."""
    while isinstance(dataset, Subset):
        dataset, sample = dataset.dataset, dataset.indices[sample]
    for name in ("samples", "files"):
        if isinstance(entries := getattr(dataset, name, None), (list, tuple)) and sample < len(entries):
            entry = entries[sample]
            file = entry[0] if isinstance(entry, (tuple, list)) and entry else entry
            if isinstance(file, (str, Path)):
                return str(Path(file).absolute())
    return None


# --- torch's DataLoader

LOOK_S = 1.0  # between looks at the time, while data workers are waited for


def sample_loader(
    keyed: KeyedDataset, sampler: Iterable[list[Draw]], begin_worker: Callable[[int], None] | None, **options: Any
) -> "DataLoader[Any]":
    """Return torch's loader of a data set's samples, with its own ``options``."""
    return DataLoader(
        keyed,
        batch_sampler=sampler,
        generator=torch.Generator(),  # its iterators draw from it, which must not shift what a step draws from
        collate_fn=as_it_is,
        worker_init_fn=partial(_begin_worker, begin_worker),
        **options,
    )


def in_time(loader: "DataLoader[Any]", name: str, timeout_s: float) -> Iterator[Any]:
    """Yield the batches, and end the run where data workers hang: alone, a rank has nobody else to miss it.

    Args:
        name: of the data set in messages.
        timeout_s: for a batch.
    """
    asked, over, hung = time.monotonic(), threading.Event(), ""
    batches = persistent(loader)

    def watch() -> None:  # a thread: to take a batch of a stopped worker waits inside of torch, for ever
        nonlocal hung
        while not over.wait(LOOK_S):
            if batches is not None and time.monotonic() > asked + timeout_s:
                workers, awaited = workers_of(batches)
                alive = [(number, each.pid) for number, each in enumerate(workers) if each.is_alive() and each.pid]
                stopped = [number for number, process in alive if is_stopped(process)]
                number = (stopped or [awaited])[0]
                hung = f"Data worker {number} (process {workers[number].pid})"
                for worker in workers:
                    worker.kill()  # which ends the wait
                return

    threading.Thread(target=watch, name="data workers", daemon=True).start()
    try:
        with garbage_left():
            batches = iter(loader)
        for batch in batches:
            asked = float("inf")
            yield batch
            asked = time.monotonic()
    except Exception as error:
        if not hung:
            of_connection = batches is not None and isinstance(error, (OSError, EOFError))
            if of_connection and (dead := _dead(workers_of(batches)[0])) is not None:
                # Torch's own message: it looks for dead workers only while it waits for the next batch.
                raise RuntimeError(
                    f"DataLoader worker (pid {dead.pid}) exited unexpectedly, with exit code {dead.exitcode}"
                ) from error
            raise
        # What broke may be a connection of a worker that is still dying, of which torch's handler tells once more.
        with suppress(RuntimeError):
            for worker in workers_of(batches)[0]:
                worker.join(1.0)  # one that is cut off from its files may not die
        raise RunFailed(
            f"{hung} of {name} gave no batch within launcher.timeout_s={timeout_s:g} seconds: stopped, "
            f"stuck or cut off from its files. If it only needs longer, raise launcher.timeout_s."
        ) from None
    finally:
        over.set()


def as_it_is(batch: Any) -> Any:
    """Collate what the data set has collated already, since it knows what a batch's random numbers are keyed by."""
    return batch


def _dead(workers: Sequence[BaseProcess]) -> BaseProcess | None:
    """Return a data worker that has died, or dies within a second."""
    ended = wait([worker.sentinel for worker in workers], timeout=1.0)
    for worker in workers:
        if worker.sentinel in ended:
            worker.join()  # its files are closed a moment before it has an exit code
    return next((worker for worker in workers if worker.exitcode), None)


def _begin_worker(own: Callable[[int], None] | None, number: int) -> None:
    """Begin a data worker, and have ``get_worker_info()`` in it tell of the data set that its user knows."""
    follow_rank(number)
    info: Any = get_worker_info()
    object.__setattr__(info, "dataset", info.dataset.dataset)  # which refuses to be changed in the usual way
    if own is not None:
        own(number)


def follow_rank(number: int) -> None:
    """End a data worker together with its rank, not when it next looks: it has the run directory's lock, too.

    Nor before: a signal to all processes, as torchrun's agent, terminals and service managers send, is for the rank to
    answer, which would fail if its worker died of it.
    """
    die_with_parent()
    if (rank := parent_process()) is not None and not rank.is_alive():  # it ended while this one was starting
        os._exit(1)
    ignore_once(ASKS_TO_STOP)
