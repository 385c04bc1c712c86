"""Data of every kind for ``test_streams.py``, models that take them, and tasks that note what they were given."""

import random
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info

from ddp_recipes import StepOutput, Task
from ddp_recipes.tasks import LanguageModelingTask

Sample = tuple[Tensor, Tensor]
VOCABULARY = 29


def sample(number: int) -> Sample:
    """Return inputs [2], and targets [1] that say which sample it is."""
    return torch.tensor([number % 13 / 13, number % 7 / 7]), torch.tensor([number / 10])


def row(number: int) -> dict[str, Any]:
    """Return the same as a row of a shard, with tokens [1 to 9]."""
    inputs, _ = sample(number)
    tokens = [1 + (number * 7 + place) % (VOCABULARY - 1) for place in range(1 + number * number % 9)]
    return {"a": inputs[0].item(), "b": inputs[1].item(), "y": number / 10, "text": f"{number}", "input_ids": tokens}


# --- what is made of rows --------------------------------------------------------------------------------------------


class Noise:
    """Adds what a sample draws at random."""

    def __call__(self, inputs: Tensor) -> Tensor:
        return inputs + 0.1 * torch.rand(inputs.shape)


def of_text(texts: list[str]) -> Sample:
    """Return the batch of samples whose numbers these texts are."""
    inputs, targets = zip(*(sample(round(float(text))) for text in texts), strict=True)
    return torch.stack(inputs), torch.stack(targets)


def of_rows(rows: list[dict[str, Any]]) -> Sample:
    """Return the batch of rows that are dicts."""
    inputs = torch.tensor([[each["a"], each["b"]] for each in rows], dtype=torch.float32)
    return inputs, torch.tensor([[each["y"]] for each in rows], dtype=torch.float32)


def padded(documents: list[Any]) -> Sample:
    """Return documents filled up with token 0 to the longest of the batch, and targets that say which they are."""
    tokens = [torch.as_tensor(each["input_ids"] if isinstance(each, dict) else each) for each in documents]
    targets = torch.stack([each.float().sum(0, keepdim=True) / 100 for each in tokens])
    return nn.utils.rnn.pad_sequence(tokens, batch_first=True), targets


class Documents(Dataset[Tensor]):
    """Documents of lengths from 1 to 9."""

    def __init__(self, size: int = 41, knows_lengths: bool = True) -> None:
        self.rows = [torch.tensor(row(number)["input_ids"]) for number in range(size)]
        if knows_lengths:
            self.lengths = [len(each) for each in self.rows]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


class Indexed(Dataset[Sample]):
    """Samples by number."""

    def __init__(self, size: int = 41, first: int = 0) -> None:
        self.size, self.first = size, first

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Sample:
        return sample(self.first + index)


def lengths_of(dataset: Any) -> list[int]:
    """Return a length for each sample of any set."""
    return [number * 7 % 11 for number in range(len(dataset))]


class Turned(Sampler[int]):
    """Some of the samples, in another order in each epoch, of which it is told or which it counts."""

    def __init__(self, data_source: Any, keep: int, told: bool = True) -> None:
        self.size, self.keep, self.epoch = len(data_source), min(keep, len(data_source)), 0
        if told:
            self.set_epoch = partial(setattr, self, "epoch")

    def __len__(self) -> int:
        return self.keep

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.size))
        random.Random(self.epoch).shuffle(order)
        self.epoch += 1
        return iter(order[: self.keep])


class Drawn(Turned):
    """Draws with replacement, from torch's generator."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randint(self.size, (self.keep,)).tolist())


class Lots(Turned):
    """Batches of 1, 2, 3, … samples."""

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __iter__(self) -> Iterator[Any]:
        left, size = list(range(self.keep)), 0
        random.Random(self.epoch).shuffle(left)
        while left:
            size += 1
            yield left[:size]
            left = left[size:]


# --- iterable-style sets ---------------------------------------------------------------------------------------------


class Numbers(IterableDataset[Sample]):
    """Gives samples 0, 1, 2, … in each process that asks."""

    def __init__(self, size: int = 41, noise: bool = False) -> None:
        self.size, self.noise = size, noise

    def __iter__(self) -> Iterator[Sample]:
        return map(self.drawn, range(self.size))

    def drawn(self, number: int) -> Sample:
        inputs, targets = sample(number)
        return inputs + 0.1 * torch.rand(2) * self.noise, targets


class Shuffled(Numbers):
    """Another order in each epoch; can be told its shard, by its constructor or a method."""

    def __init__(self, size: int = 41, noise: bool = False, num_shards: int = 1, index: int = 0) -> None:
        super().__init__(size, noise)
        self.num_shards, self.index, self.epoch = num_shards, index, 0

    def shard(self, num_shards: int, index: int) -> "Shuffled":
        return Shuffled(self.size, self.noise, num_shards, index)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def order(self) -> list[int]:
        """Return the samples of the epoch."""
        order = list(range(self.size))
        random.Random(self.epoch).shuffle(order)
        return order[self.index :: self.num_shards]

    def __iter__(self) -> Iterator[Sample]:
        return map(self.drawn, self.order())


class ByWorker(Shuffled):
    """Deals its samples to data workers."""

    def __iter__(self) -> Iterator[Sample]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        return (each for at, each in enumerate(super().__iter__()) if at % workers == worker)


class Stateful(Shuffled):
    """Keeps its place, as torchdata's protocol has it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.at, self.resumes = 0, 0

    def __iter__(self) -> Iterator[Sample]:
        self.at, self.resumes = self.resumes, 0
        for number in self.order()[self.at :]:  # what it passes over draws nothing
            self.at += 1
            yield self.drawn(number)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "of": [torch.tensor(self.at)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.resumes = int(state["of"][0])


class Batches(Numbers):
    """Gives whole batches of 3."""

    batched = True

    def __iter__(self) -> Iterator[Any]:
        every = list(map(self.drawn, range(self.size)))
        for start in range(0, self.size, 3):
            inputs, targets = zip(*every[start : start + 3], strict=True)
            yield torch.stack(inputs), torch.stack(targets)


def hugging_face(files: str, buffer: int = 0) -> Any:
    """Return a streaming set of Hugging Face's."""
    from datasets import load_dataset

    found = load_dataset("json", data_files=files, split="train", streaming=True)
    return found.shuffle(seed=3, buffer_size=buffer) if buffer else found


# --- models ----------------------------------------------------------------------------------------------------------


class Net(nn.Sequential):
    """A perceptron, [n, 2] to [n, 1]."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 1))


class Bag(nn.Sequential):
    """The sum of what tokens stand for, [n, length] to [n, 1]; token 0 stands for nothing."""

    def __init__(self) -> None:
        super().__init__(nn.EmbeddingBag(VOCABULARY, 5, mode="sum", padding_idx=0), nn.Tanh(), nn.Linear(5, 1))


class Tokens(nn.Sequential):
    """Which token follows, from the one before, [n, length] to [n, length, tokens]."""

    def __init__(self) -> None:
        super().__init__(nn.Embedding(VOCABULARY, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, VOCABULARY))


# --- what was given --------------------------------------------------------------------------------------------------


def noted(folder: Path, rank: int, step: int, targets: Tensor) -> None:
    """Append a line: the step, and a checksum of each sample's targets."""
    found = [zlib.crc32(each.detach().cpu().contiguous().numpy().tobytes()) for each in targets]
    with (folder / f"seen_{rank}").open("a") as file:
        file.write(f"{step} {' '.join(map(str, found))}\n")


class Noting(Task):
    """Notes the samples of each training batch."""

    folder: Path

    def attach(self, context: Any) -> None:
        super().attach(context)
        self.rank = context.world.rank

    def training_step(self, batch: Any) -> StepOutput:
        noted(self.folder, self.rank, self.position.step, batch[1])
        return super().training_step(batch)


class Seen(Noting):
    """The same, of numbers to predict."""

    def __init__(self, folder: str, **parts: Any) -> None:
        super().__init__(**parts)
        self.folder = Path(folder)


class SeenText(Noting, LanguageModelingTask):
    """The same, of tokens."""

    def __init__(self, folder: str, **parts: Any) -> None:
        LanguageModelingTask.__init__(self, **parts)
        self.folder = Path(folder)


# --- Lightning -------------------------------------------------------------------------------------------------------


def module(folder: str, **options: Any) -> Any:
    """Return a LightningModule with loaders of its own; ``options`` are those of :func:`loader`."""
    from lightning import LightningModule

    class Module(LightningModule):  # type: ignore[misc, no-any-unimported]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, inputs: Tensor) -> Tensor:
            found: Tensor = self.net(inputs)
            return found

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            noted(Path(folder), self.trainer.global_rank, self.trainer.global_step + 1, batch[1])
            return nn.functional.mse_loss(self(batch[0]), batch[1])

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val/loss", nn.functional.mse_loss(self(batch[0]), batch[1]))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

        def train_dataloader(self) -> Any:
            return loader(**options)

        def val_dataloader(self) -> Any:
            return DataLoader(Indexed(11, 100), batch_size=4)

    return Module()


def loader(
    kind: str = "Indexed",
    path: str | None = None,
    shuffle: bool = False,
    batch_size: int = 12,
    num_workers: int = 0,
    drop_last: bool = False,
    on_error: str = "raise",
    parts: int = 0,
) -> Any:
    """Return a loader of a set of this module, or of shards; of both where there are ``parts``."""
    made: Any
    if path is None:
        made = globals()[kind]()
    else:
        from ddp_recipes.streams import Stream

        made = Stream(path, inputs=["a", "b"], targets=["y"], on_error=on_error)
    if parts:
        made = torch.utils.data.ConcatDataset([made, Indexed(parts, 200)])
    order = {} if isinstance(made, IterableDataset) else {"shuffle": shuffle}
    persistent = {"persistent_workers": True} if num_workers and shuffle else {}
    return DataLoader(made, batch_size, num_workers=num_workers, drop_last=drop_last, **order, **persistent)
