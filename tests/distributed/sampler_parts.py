"""Samplers and batch samplers that a user might bring."""

import random
from collections.abc import Iterator, Sized
from pathlib import Path
from typing import Any, cast

import torch
from iterable_parts import Indexed
from own_parts import Lit
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler, get_worker_info


class Told(Sampler[int]):
    """Shuffles by the epoch that it is told; gives fewer samples than there are."""

    def __init__(self, data_source: Sized, keep: int = 11) -> None:
        self.size, self.keep, self.epoch = len(data_source), keep, 0

    def __len__(self) -> int:
        return self.keep

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.size))
        random.Random(self.epoch).shuffle(order)
        return iter(order[: self.keep])


class Counting(Told):
    """Counts its epochs itself."""

    set_epoch = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return super().__iter__()


class Drawing(Told):
    """Draws from torch's global generator, and gives a sample twice."""

    set_epoch = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self.size).tolist()
        return iter([*order[: self.keep - 1], order[0]])


class Pairs(Sampler[list[int]]):
    """Gives each sample twice in a batch, for two views of it."""

    def __init__(self, dataset: Sized) -> None:
        self.size = len(dataset)

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[number, number] for number in range(self.size)])


class Views(Indexed):
    """Samples whose first number is drawn at random."""

    def __getitem__(self, index: int) -> Any:
        inputs, targets = super().__getitem__(index)
        inputs[0] = int(torch.randint(10**6, ()))
        return inputs, targets


class Uneven(Sampler[list[int]]):
    """Gives batches of 5, 1, 4 and 3 samples, in another order in each epoch."""

    SIZES = (5, 1, 4, 3)

    def __init__(self, dataset: Sized) -> None:
        self.size, self.epoch = len(dataset), 0

    def __len__(self) -> int:
        return len(self.SIZES)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(self.size))
        random.Random(self.epoch).shuffle(order)
        sizes = list(self.SIZES)
        random.Random(self.epoch).shuffle(sizes)
        for size in sizes:
            yield [order.pop() for _ in range(size)]


class Restless(Told):
    """Draws from what nobody can seed."""

    def __iter__(self) -> Iterator[int]:
        return iter(random.SystemRandom().sample(range(self.size), self.keep))


class Endless(Told):
    """Has no end, though it says so."""

    def __iter__(self) -> Iterator[int]:
        while True:
            yield 0


class Odd(Told):
    """Gives what is no number of a sample."""

    def __init__(self, data_source: Sized, gives: list[Any]) -> None:
        super().__init__(data_source, len(gives))
        self.gives = gives

    def __iter__(self) -> Iterator[Any]:
        return iter(self.gives)


class Shrinking(Told):
    """Gives fewer samples in its second epoch."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.keep - self.epoch))


class Lengthy(Indexed):
    """Knows how long its samples are."""

    def __init__(self, size: int = 13) -> None:
        super().__init__(size)
        self.lengths = [number * 5 % 13 for number in range(size)]

    def sizes(self) -> list[int]:
        return self.lengths


def lengths_of(dataset: Lengthy) -> list[int]:
    """Return the lengths of its samples."""
    return dataset.lengths


class Closed(Indexed):
    """A data set that each data worker opens for itself."""

    file = 0

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        assert cast(Any, get_worker_info()).dataset is self
        assert self.file == 1, "nobody has opened it"
        return super().__getitem__(index)


def opened(number: int) -> None:
    """Open the data set of a data worker, and seed it as PyTorch's page on reproducibility has it."""
    random.seed(torch.initial_seed() % 2**32)
    cast(Any, get_worker_info()).dataset.file += 1 + number


class Brings(Lit):
    """A LightningModule whose loader has a sampler of its own; writes down which samples it was given."""

    def __init__(self, folder: str, kind: str, **options: Any) -> None:
        super().__init__(**options)
        self.folder, self.kind = Path(folder), kind

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        with (self.folder / "seen_0").open("a") as file:
            file.write(f"train 0 {' '.join(str(int(value)) for value in batch[0][:, 0])}\n")
        return super().training_step(batch, batch_idx)

    def train_dataloader(self) -> Any:
        data = Indexed()
        if self.kind == "batch_sampler":
            return DataLoader(data, batch_sampler=Uneven(data))
        if self.kind == "of_torch":
            return DataLoader(data, batch_sampler=BatchSampler(Told(data), 3, drop_last=True))
        if self.kind == "in_turn":
            return DataLoader(data, batch_size=4, sampler=DistributedSampler(data, 2, 0, shuffle=False))
        if self.kind == "opened":
            return DataLoader(Closed(), batch_size=4, num_workers=1, worker_init_fn=opened)
        if self.kind == "dealt":
            return DataLoader(data, batch_sampler=BatchSampler(DistributedSampler(data, 2, 0), 3, drop_last=True))
        return DataLoader(data, batch_size=4, sampler=Told(data), drop_last=True)
