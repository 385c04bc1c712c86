"""The data of the workloads: as a tutorial reads them, as tensors, and on a GPU."""

import math
import os
import struct
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from ddp_recipes.datasets import InMemory, fake_images, mnist, random_regression, text

ROOT = Path(__file__).resolve().parents[1]
DATA = "DDP_RECIPES_BENCH_DATA"  # where made-up MNIST files go if there are no real ones
SEED = 42
CONTEXT = 128  # bytes of a window of text


def python_path() -> str:
    """Return the ``PYTHONPATH`` of a process that finds these benchmarks, whatever folder it is started in."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


Tensors = tuple[Tensor, Tensor]
"""Inputs ``[n, ...]``, as bytes where they are to be divided by 255, and targets ``[n, ...]``."""


def scaled(inputs: Tensor) -> Tensor:
    """Return images of bytes as 0..1, anything else as it is."""
    return inputs.to(torch.float32).div_(255) if inputs.dtype == torch.uint8 else inputs


def toy(samples: int) -> Tensors:
    """Return random inputs ``[n, 10]`` and a linear map of them, ``[n, 5]``."""
    dataset = random_regression(num_samples=samples, seed=SEED)
    return dataset.inputs, dataset.targets


def images(size: int, samples: int) -> InMemory:
    """Return made-up images of ten classes, sample by sample."""
    return fake_images(num_samples=samples, image_size=size, seed=SEED)


def image_tensors(size: int, samples: int) -> Tensors:
    """Return the same as tensors."""
    dataset = images(size, samples)
    assert dataset.rows is not None
    return dataset.inputs[dataset.rows], dataset.targets


def tokens(samples: int = 8192, length: int = 128) -> Tensors:
    """Return random sequences of tokens; the class of each is the last digit of its first token."""
    drawn = torch.randint(0, 1000, (samples, length), generator=torch.Generator().manual_seed(SEED))
    return drawn, drawn[:, 0] % 10


def windows() -> Tensors:
    """Return windows of the topics of Python's ``help()``, and what follows each of their bytes."""
    dataset = text(None, CONTEXT, "train")
    return dataset.fetch(torch.arange(len(dataset)))


def mnist_files() -> Dataset[Any]:
    """Return MNIST as every tutorial reads it: one image after the other through PIL."""
    from torchvision import datasets, transforms

    dataset: Dataset[Any] = datasets.MNIST(str(mnist_root()), train=True, transform=transforms.ToTensor())
    return dataset


def mnist_tensors() -> Tensors:
    """Return the same as tensors."""
    dataset = mnist(mnist_root())
    return dataset.inputs, dataset.targets


@cache
def mnist_root() -> Path:
    """Return the folder that holds ``MNIST/raw``: real files where they are, else made-up ones of the same format."""
    real = Path(os.environ.get("DDP_RECIPES_TEST_DATA") or ROOT.parent / "shared" / "data")
    if (real / "MNIST" / "raw").is_dir():
        return real
    made_up = Path(os.environ[DATA])
    if not (made_up / "MNIST" / "raw").is_dir():
        write_mnist(made_up / "MNIST" / "raw")
    return made_up


def write_mnist(folder: Path, train: int = 22_000, test: int = 1_000) -> None:
    """Write made-up digits in MNIST's four files: each class is a pattern under noise."""
    generator = torch.Generator().manual_seed(SEED)
    patterns = torch.randint(0, 128, (10, 28, 28), generator=generator)
    folder.mkdir(parents=True)
    for prefix, count in (("train", train), ("t10k", test)):
        classes = torch.randint(0, 10, (count,), generator=generator)
        pixels = patterns[classes] + torch.randint(0, 128, (count, 28, 28), generator=generator)
        for kind, header, values in (
            ("images-idx3", struct.pack(">4B3I", 0, 0, 8, 3, count, 28, 28), pixels),
            ("labels-idx1", struct.pack(">4BI", 0, 0, 8, 1, count), classes),
        ):
            (folder / f"{prefix}-{kind}-ubyte").write_bytes(header + values.to(torch.uint8).numpy().tobytes())


class OnDevice(Dataset[Any]):
    """A workload's tensors on the GPU, given out by whole batches: as a user would write it for ``train.py``."""

    batched = True

    def __init__(self, workload: str) -> None:
        from benchmarks.workloads import get

        on_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        inputs, targets = get(workload).tensors()
        self.inputs, self.targets = inputs.to(self.device), targets.to(self.device)

    def __len__(self) -> int:
        return len(self.targets)

    def fetch(self, indices: Tensor) -> Tensors:
        """Return inputs and targets of the samples ``indices``, without waiting for the device."""
        if self.device.type == "cuda":
            indices = indices.pin_memory().to(self.device, non_blocking=True)
        return scaled(self.inputs.index_select(0, indices)), self.targets.index_select(0, indices)


class Transformer(nn.Module):
    """A small encoder that classifies sequences of tokens: int64 ``[n, length]`` to ``[n, 10]``."""

    def __init__(self, length: int = 128, width: int = 256, layers: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, width)
        self.position = nn.Parameter(torch.randn(length, width) / math.sqrt(width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.head(self.encoder(self.embedding(tokens) + self.position).mean(dim=1))
        return output


def resnet(name: str, channels_last: bool = False) -> nn.Module:
    """Return one of torchvision's ResNets, for ten classes; its activations follow the memory order of its weights."""
    import torchvision

    model: nn.Module = getattr(torchvision.models, name)(num_classes=10)
    order = torch.channels_last if channels_last else torch.contiguous_format
    return model.to(memory_format=order)


class WithTable(nn.Module):
    """ResNet-18 for ten classes and a table that is not trained, with which the state is 500 MB with Adam."""

    def __init__(self, rows: int = 90_000, width: int = 1000) -> None:
        super().__init__()
        self.trained = resnet("resnet18")
        self.table = nn.Parameter(torch.ones(rows, width), requires_grad=False)

    def forward(self, images: Tensor) -> Tensor:
        output: Tensor = self.trained(images)
        return output
