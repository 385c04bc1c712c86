"""Data sets and tasks that a user might bring, found by their dotted names."""

import logging
import os
import warnings
from collections import UserDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from ddp_recipes import StepOutput, Task


class Announced(Task):
    """Writes down which data set is evaluated next."""

    def __init__(self, folder: str, **parts: Any) -> None:
        super().__init__(**parts)
        self.folder = Path(folder)

    def start_evaluation(self, split: str, number: int) -> None:
        with (self.folder / "announced").open("a") as file:
            file.write(f"{split} {number}, ")


class Ragged(Dataset[Any]):
    """Sequences of different lengths, as a dict each, with noise that each sample draws."""

    def __init__(self, size: int = 40, labels: int = 5, broken: int | None = None) -> None:
        self.broken = broken
        self.targets = [index % labels for index in range(size)]
        self.rare = [1.0 + 9 * (target == 1) for target in self.targets]

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == self.broken:
            raise KeyError("no such file")
        length = 1 + index % 7
        return {"values": np.arange(length) * 0.1 + np.random.rand(), "label": self.targets[index]}


class Halves(Dataset[Any]):
    """Brings its own order: in each epoch one half of the samples, forwards or, not shuffled, backwards."""

    num_samples, repeats = 12, False

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        with (self.folder / f"pid_{os.getpid()}").open("a") as file:
            file.write(f"{index}\n")
        return torch.full((10,), float(index)), torch.zeros(5)

    def sample_order(self, seed: int, shuffle: bool) -> "HalfOrder":
        return HalfOrder(self.num_samples, shuffle)


@dataclass(frozen=True)
class HalfOrder:
    num_samples: int
    forwards: bool
    repeats = False

    def __len__(self) -> int:
        return self.num_samples // 2

    def samples(self, epoch: int, positions: NDArray[np.uint64]) -> NDArray[np.uint64]:
        found = positions + np.uint64(epoch % 2 * len(self))
        return found if self.forwards else np.uint64(self.num_samples - 1) - found


def padded(
    samples: list[dict[str, Any]], length: int | None = 10, dtype: str = "float32", as_dict: bool = False
) -> Any:
    """Return values [n, length], or as long as the longest, with zeros behind them, and labels [n]."""
    rows = [torch.from_numpy(sample["values"]).float() for sample in samples]
    length = length or max(map(len, rows))
    batch = torch.stack([torch.nn.functional.pad(row, (0, length - len(row))) for row in rows])
    labels = torch.tensor([sample["label"] for sample in samples])
    batch = batch.to(getattr(torch, dtype))
    return {"values": batch, "label": labels} if as_dict else (batch, labels)


@dataclass
class Padded:
    values: torch.Tensor
    label: torch.Tensor


def of_kind(samples: list[dict[str, Any]], kind: str) -> Any:
    """Return what :func:`padded` does in another kind of batch, a dict's with a list of weights."""
    values, label = padded(samples)
    if kind == "dataclass":
        return Padded(values, label)
    if kind == "mapping":
        return UserDict(values=values, label=label)
    if kind in ("sparse", "nested"):
        made = values.to_sparse() if kind == "sparse" else torch.nested.nested_tensor([*values], layout=torch.jagged)
        return {"values": made, "label": label}
    batch = {"values": values, "label": label, "weights": [1.0 + sample["label"] for sample in samples]}
    return {**batch, "count": len(samples)} if kind == "count" else batch


class OfKind(Task):
    """Takes any of these."""

    def training_step(self, batch: Any) -> StepOutput:
        batch = vars(batch) if isinstance(batch, Padded) else batch
        values, label = batch["values"], batch["label"]
        if values.is_nested:
            values = torch.nested.to_padded_tensor(values, 0.0)
        losses = cross_entropy(self.model(values.to_dense()), label, reduction="none")
        return StepOutput((losses * torch.tensor(batch.get("weights", 1.0))).mean(), {}, len(label))

    validation_step = training_step

    def predict_step(self, batch: Any) -> dict[str, Any]:
        return {"logits": self.model(batch["values"]), "weights": batch["weights"]}


def as_much_as(dataset: Ragged, target: int) -> list[float]:
    """Return weights that leave nothing but one label."""
    return [float(each == target) for each in dataset.targets]


class Complaining(Dataset[Any]):
    """Logs for each sample a record with a long traceback and one by ``warnings``."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        try:
            raise ValueError(f"number {'0123456789' * 500}")
        except ValueError:
            logging.getLogger("cats").warning("sample %d is torn", index, exc_info=True)
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn(f"sample {index} is worn out", stacklevel=1)
        return torch.full((10,), index / self.size), torch.ones(5)


class Masks(Dataset[Any]):
    """Tiny images and the class of each pixel, whether it is dark; of some rows, more of each sample, none counts."""

    def __init__(self, size: int) -> None:
        self.images = torch.rand(size, 3, 32, 32, generator=torch.Generator().manual_seed(size))
        self.masks = (self.images.mean(1) < 0.5).long()
        for number, mask in enumerate(self.masks):
            mask[: 4 * number] = -100

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images[index], self.masks[index]


class Unsqueezed(Task):
    """Returns a loss of the shape [1], or none of what a step returns."""

    def __init__(self, nothing: bool = False, **parts: Any) -> None:
        super().__init__(**parts)
        self.nothing = nothing

    def training_step(self, batch: Any) -> Any:
        output = super().training_step(batch)
        return None if self.nothing else output._replace(loss=output.loss.reshape(1))
