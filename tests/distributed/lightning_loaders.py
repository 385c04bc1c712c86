"""Modules that bring several loaders to train on, whose batches come together."""

from collections.abc import Iterator
from typing import Any

import torch
from own_parts import Lit
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler

Batch = tuple[Tensor, Tensor]


class Noisy(Dataset[Batch]):
    """Points that are a little elsewhere each time."""

    def __init__(self, count: int) -> None:
        drawn = torch.Generator().manual_seed(count)
        self.inputs = torch.randn(count, 10, generator=drawn)
        self.targets = torch.randn(count, 5, generator=drawn)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Batch:
        return self.inputs[index] + 0.1 * torch.randn(10), self.targets[index]


class Joined(Lit):
    """Trains on three sets, of which the second is the longest."""

    def __init__(self, workers: int = 0, **_: Any) -> None:
        super().__init__(10, 8, 5)
        self.workers = workers

    def loader(self, count: int, batch_size: int) -> Any:
        return DataLoader(Noisy(count), batch_size, shuffle=True, num_workers=self.workers)

    def train_dataloader(self) -> Any:
        return {"one": self.loader(16, 4), "others": [self.loader(20, 2), self.loader(6, 1)]}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        every = [batch["one"], *batch["others"]]
        losses = [nn.functional.mse_loss(self(inputs), targets) for inputs, targets in every]
        return torch.stack(losses).sum()


class ByEpoch(Dataset[Batch]):
    """Points at one place, whose numbers have the epoch times their count added, as those of a mixture have."""

    repeats = False

    def __init__(self, value: float, count: int = 20) -> None:
        self.value, self.count = value, count

    def __len__(self) -> int:
        return self.count

    def sample_order(self, seed: int, shuffle: bool) -> Any:
        return self

    def samples(self, epoch: int, positions: Any) -> Any:
        return positions + epoch * self.count

    def __getitem__(self, index: int) -> Batch:
        return torch.full((10,), self.value), torch.full((5,), self.value)


class Numbered(Joined):
    """Trains on two such sets."""

    def train_dataloader(self) -> Any:
        return [DataLoader(ByEpoch(value), 2, num_workers=self.workers) for value in (1.0, 2.0)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for value, (_, targets) in enumerate(batch, 1):
            assert bool((targets == value).all()), "each loader gives samples of its own"
        return super().training_step({"one": batch[0], "others": batch[1:]}, batch_idx)


class Streamed(Joined):
    """Brings a stream among them."""

    class Stream(IterableDataset[Batch]):
        def __iter__(self) -> Iterator[Batch]:
            return iter([(torch.ones(10), torch.ones(5))] * 4)

    def train_dataloader(self) -> Any:
        return [self.loader(16, 4), DataLoader(self.Stream(), 2)]


class Batched(Joined):
    """Brings a batch sampler among them."""

    def train_dataloader(self) -> Any:
        batches = BatchSampler(SequentialSampler(range(16)), 4, drop_last=False)
        return [self.loader(16, 4), DataLoader(Noisy(16), batch_sampler=batches)]


class Uneven(Joined):
    """Has a set whose last batch is a single sample."""

    def train_dataloader(self) -> Any:
        return [self.loader(16, 4), self.loader(5, 2)]


class CombinedLoader:
    """Loaders that come together, by the name of Lightning's."""

    def __init__(self, iterables: Any) -> None:
        self.iterables, self._mode = iterables, "max_size_cycle"


class Nested(Joined):
    """Has loaders that come together among those that do."""

    def train_dataloader(self) -> Any:
        return [self.loader(16, 4), CombinedLoader([self.loader(16, 4)])]


class Without(Joined):
    """Brings none."""

    def train_dataloader(self) -> Any:
        return {}
