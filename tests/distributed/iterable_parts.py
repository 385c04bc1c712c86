"""Iterable-style data sets that a user might bring, and a task that writes down which samples it was given."""

import itertools
import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from own_parts import Lit
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from ddp_recipes import StepOutput, Task
from ddp_recipes.data.keyed import skip

Sample = tuple[Tensor, Tensor]


def sample(number: int) -> Sample:
    """Return a sample that says which one it is, in its first feature."""
    inputs = torch.sin(torch.arange(10.0) * (number + 1))
    inputs[0] = number
    return inputs, inputs[1:6] * 2


class Numbers(IterableDataset[Sample]):
    """Gives samples 0, 1, 2, …: the same in each data worker, for it does not ask which one it is in."""

    def __init__(self, size: int = 13, first: int = 0) -> None:
        self.size, self.first = size, first

    def __iter__(self) -> Iterator[Sample]:
        return map(sample, range(self.first, self.first + self.size))


class Itself(IterableDataset[Sample]):
    """Is its own iterator, begun anew by ``__iter__`` as LitData's, with methods of the names of webdataset and MDS."""

    def __init__(self, size: int = 13) -> None:
        self.size = self.number = size

    def __iter__(self) -> Iterator[Sample]:
        self.number = 0
        return self

    def __next__(self) -> Sample:
        if self.number == self.size:
            raise StopIteration
        self.number += 1
        return sample(self.number - 1)

    def batched(self, size: int) -> NoReturn:
        """Put samples together, which is for whoever calls it."""
        raise AssertionError

    def state_dict(self, num_samples: int, from_beginning: bool) -> NoReturn:
        """Be asked with what only its own loader knows."""
        raise AssertionError

    load_state_dict = state_dict


class Spent(Itself):
    """Is its own iterator, and begins once."""

    def __iter__(self) -> Iterator[Sample]:
        return self


class Spawned(Numbers):
    """Has to be read in a process that was spawned, and waits there for ever if it has not 13 samples."""

    def __iter__(self) -> Iterator[Sample]:
        if get_worker_info() is not None:
            assert "__mp_main__" in sys.modules, "forked"
            if self.size != 13:
                threading.Event().wait()
        return super().__iter__()


class Late(Numbers):
    """Gets to a data worker once its rank has ended, and then gives nothing, for ever."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "rank": os.getpid()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        while os.getppid() == state["rank"]:
            time.sleep(0.01)

    def __iter__(self) -> Iterator[Sample]:
        if get_worker_info() is not None:
            threading.Event().wait()
        return super().__iter__()


class Holes(Numbers):
    """Leaves out some of its samples, the last one as well, and says so."""

    skips = True

    def __iter__(self) -> Iterator[Sample]:
        for number in range(self.size):
            if number % 4 == 0:
                skip(f"number {number}")
            else:
                yield sample(number)


class Endless(IterableDataset[Sample]):
    """Has no end."""

    def __iter__(self) -> Iterator[Sample]:
        return map(sample, itertools.count())


class ByWorker(Numbers):
    """Deals its samples to data workers, as torch's documentation has it."""

    def __iter__(self) -> Iterator[Sample]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        return map(sample, range(self.first + worker, self.first + self.size, workers))


class Sharded(Numbers):
    """Takes the number of its shard, in its constructor or by a method; shuffles by the epoch."""

    def __init__(self, size: int = 13, num_shards: int = 1, index: int = 0) -> None:
        super().__init__(size)
        self.num_shards, self.index, self.epoch = num_shards, index, 0

    def shard(self, num_shards: int, index: int) -> "Sharded":
        return Sharded(self.size, num_shards, index)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Sample]:
        order = list(range(self.size))
        random.Random(self.epoch).shuffle(order)
        return map(sample, order[self.index :: self.num_shards])


class Told(Numbers):
    """Writes down the epochs that it is told."""

    def __init__(self, told: str) -> None:
        super().__init__()
        self.told = Path(told)

    def set_epoch(self, epoch: int) -> None:
        with self.told.open("a") as file:
            file.write(f"{epoch} ")


class ByRank(Numbers):
    """Deals its samples to ranks by itself."""

    def __iter__(self) -> Iterator[Sample]:
        import torch.distributed as dist

        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        return map(sample, range(rank, self.size, world))


class Kept(Numbers):
    """Has a state, and draws noise; counts how many samples it has read."""

    def __init__(self, size: int = 13, reads: str | None = None) -> None:
        super().__init__(size)
        self.at, self.resumes, self.reads = 0, 0, reads

    def __iter__(self) -> Iterator[Sample]:
        first, self.resumes = self.resumes, 0
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        for number in range(first or worker, self.size, workers):
            self.at = number + workers
            if self.reads is not None:
                with Path(self.reads).open("a") as file:
                    file.write(f"{number} ")
            inputs, targets = sample(number)
            yield inputs, targets + torch.rand(5)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "of": {"tensor": torch.tensor(self.at)}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert int(state["of"]["tensor"]) == state["at"]
        self.resumes = state["at"]


class Drawn(Numbers):
    """Draws its samples from a generator that nobody has seeded."""

    def __iter__(self) -> Iterator[Sample]:
        return (sample(random.SystemRandom().randrange(10**6)) for _ in range(self.size))


class Batches(Numbers):
    """Gives whole batches of 3."""

    batched = True

    def __iter__(self) -> Iterator[Sample]:
        every = list(map(sample, range(self.size)))
        for start in range(0, self.size, 3):
            inputs, targets = zip(*every[start : start + 3], strict=True)
            yield torch.stack(inputs), torch.stack(targets)


class Failing(Numbers):
    """Cannot go on after a few samples."""

    def __iter__(self) -> Iterator[Sample]:
        yield from map(sample, range(5))
        raise OSError("the store is away")


class Seen(Task):
    """Writes down the samples of each batch, by rank: ``train 0 0 1 2`` is the first step's."""

    def __init__(self, folder: str, **parts: Any) -> None:
        super().__init__(**parts)
        self.folder = Path(folder)

    def attach(self, context: Any) -> None:
        super().attach(context)
        self.rank = context.world.rank

    def note(self, split: str, inputs: Tensor) -> None:
        with (self.folder / f"seen_{self.rank}").open("a") as file:
            file.write(f"{split} {self.position.step} {' '.join(str(int(value)) for value in inputs[:, 0])}\n")

    def training_step(self, batch: Any) -> StepOutput:
        self.note("train", batch[0])
        return super().training_step(batch)

    def validation_step(self, batch: Any) -> StepOutput:
        self.note("val", batch[0])
        return super().validation_step(batch)


class Indexed(Dataset[Sample]):
    """The same samples, with an index."""

    def __init__(self, size: int = 13, first: int = 0) -> None:
        self.size, self.first = size, first

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Sample:
        return sample(self.first + index)


def once() -> Iterator[Sample]:
    """Return what can be read once."""
    yield from map(sample, range(13))


def rows_of(files: str) -> Any:
    """Return a streaming set of Hugging Face's."""
    from datasets import load_dataset

    return load_dataset("json", data_files=files, split="train", streaming=True)


def of_rows(rows: list[dict[str, Any]]) -> Sample:
    """Return a batch of such rows."""
    inputs, targets = zip(*(sample(row["number"]) for row in rows), strict=True)
    return torch.stack(inputs), torch.stack(targets)


def half(worker: int) -> None:
    """Leave a data worker its half, as torch's documentation has it."""
    dataset: Any = get_worker_info().dataset  # type: ignore[union-attr]
    dataset.first, dataset.size = 6 * worker, 6 + worker


class Streams:
    """A data module whose loaders read streams; ``bare`` ones give batches without a loader, as webdataset's do."""

    def __init__(
        self,
        kind: str = "Numbers",
        batch_size: int | None = 2,
        workers: int = 0,
        begins: bool = False,
        size: int = 13,
        bare: bool = False,
        **options: Any,
    ) -> None:
        self.kind, self.begins, self.size, self.bare = kind, begins, size, bare
        self.options: Any = {"batch_size": batch_size, "num_workers": workers, "drop_last": batch_size is not None}
        self.options |= options

    def train_dataloader(self) -> Any:
        dataset = globals()[self.kind]()
        dataset.size = self.size
        if self.bare:
            return dataset
        return DataLoader(dataset, worker_init_fn=half if self.begins else None, **self.options)

    def val_dataloader(self) -> Any:
        kind = ByRank if self.kind == "ByRank" else Numbers
        return DataLoader(kind(9), batch_size=2, drop_last=True)


class Module(Lit):
    """Looks at its trainer's loaders."""

    def on_train_start(self) -> None:
        assert self.trainer.num_training_batches == float("inf")
        found = sum(len(batch) for batch, _ in self.trainer.val_dataloaders)
        assert found == 8 // self.trainer.world_size, "as many as this rank has"
        with pytest.raises(TypeError, match="has no length"):
            len(self.trainer.val_dataloaders)

    def on_train_epoch_end(self) -> None:
        assert self.trainer.is_last_batch
