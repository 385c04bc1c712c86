"""What is trained: one definition of model, data, loss and optimizer for all, and the same for ``train.py``."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from benchmarks import samples
from benchmarks.samples import ROOT, SEED, Tensors, scaled
from ddp_recipes.models import GPT, MLP, Toy


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Something to train.

    Attributes:
        batch_size: samples a rank.
        model: makes the model; its weights follow from torch's seed.
        dataset: makes the data set as a tutorial has it, sample by sample; ``None``: ``tensors`` one by one.
        tensors: makes the same as tensors.
        lr, momentum: of SGD.
        adam: AdamW in its place.
        sharded: all ranks hold the model together, so all have to measure its loss.
        model_overrides, data_overrides: the same for ``train.py``.
        sizes: what a model takes and gives, for ``train.py`` with the data on a GPU.
        level_samples: so many of the first samples show how far the model has come.
    """

    batch_size: int
    model: Callable[[], nn.Module]
    tensors: Callable[[], Tensors]
    lr: float
    momentum: float
    model_overrides: tuple[str, ...]
    data_overrides: tuple[str, ...] = ()
    dataset: Callable[[], Dataset[Any]] | None = None
    loss: nn.Module
    sizes: tuple[int, int] = (1, 10)
    level_samples: int = 1024
    bfloat16: bool = False
    adam: bool = False
    sharded: bool = False

    def make_model(self, device: torch.device) -> nn.Module:
        """Return the model on the device, with weights from the seed."""
        torch.manual_seed(SEED)
        return self.model().to(device)

    def make_dataset(self) -> Dataset[Any]:
        """Return the data set as a tutorial has it."""
        return TensorDataset(*self.tensors()) if self.dataset is None else self.dataset()

    def make_optimizer(self, model: nn.Module, fused: bool | None = None) -> torch.optim.Optimizer:
        """Return the optimizer of a model."""
        if self.adam:
            return torch.optim.AdamW(model.parameters(), lr=self.lr, fused=fused)
        return torch.optim.SGD(model.parameters(), lr=self.lr, momentum=self.momentum, fused=fused)

    def forward(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return the context of a forward pass."""
        return torch.autocast(device.type, torch.bfloat16) if self.bfloat16 else nullcontext()

    def level(self, model: nn.Module) -> Callable[[], float]:
        """Return what measures the loss of the model on the first samples, without touching its training."""
        device = next(model.parameters()).device
        inputs, targets = (tensor[: self.level_samples].to(device) for tensor in self.tensors())

        def measure() -> float:
            model.eval()
            with torch.no_grad(), self.forward(device):
                loss: Tensor = self.loss(model(scaled(inputs)), targets)
            model.train()
            return loss.item()

        return measure

    def overrides(self, name: str, device: str, shuffle: bool) -> list[str]:
        """Return what makes ``train.py`` train this workload, called ``name``; on a GPU with its data there."""
        data = self.data_overrides
        if device == "cuda":
            task = "regression" if isinstance(self.loss, nn.MSELoss) else "classification"
            inputs, outputs = self.sizes
            sizes = (f"data.in_features={inputs}", f"data.out_features={outputs}")
            data = (f"--config-dir={ROOT / 'benchmarks' / 'conf'}", "data=on_device", f"data.workload={name}", *sizes)
            data = (*data, f"task={task}")
        if not shuffle:
            data = (*data, "data.shuffle=false", "data.shard=strided")  # as DistributedSampler deals samples
        precision = "bf16-mixed" if self.bfloat16 else "32-true"
        return [
            *data,
            f"data.batch_size={self.batch_size}",
            "data.val=null",
            *self.model_overrides,
            *(["optimizer=adamw"] if self.adam else ["optimizer=sgd", f"optimizer.momentum={self.momentum}"]),
            f"optimizer.lr={self.lr}",
            f"trainer.precision={precision}",
            f"launcher.device={device}",
        ]


def toy(epoch_batches: int | None) -> Workload:
    """Return the model of PyTorch's DDP tutorial on random data."""
    count = 20 * (epoch_batches or 2500)
    return Workload(
        batch_size=20,
        model=Toy,
        tensors=partial(samples.toy, count),
        lr=0.01,
        momentum=0.0,
        loss=nn.MSELoss(),
        model_overrides=("model=toy",),
        data_overrides=("data=random", f"data.num_samples={count}"),
        sizes=(10, 5),
    )


def mnist(epoch_batches: int | None) -> Workload:
    """Return a perceptron on MNIST. There is no ``Normalize``: it would cost the tutorial's loop a lot."""
    return Workload(
        batch_size=64,
        model=partial(MLP, 784, [128], 10),
        tensors=samples.mnist_tensors,
        dataset=samples.mnist_files,
        lr=0.05,
        momentum=0.9,
        loss=nn.CrossEntropyLoss(),
        model_overrides=("model=mlp", "model.hidden_features=[128]"),
        data_overrides=(
            "data=mnist",
            f"data.root={samples.mnist_root()}",
            "data.train.transform={_target_: torchvision.transforms.ToTensor}",
        ),
        sizes=(784, 10),
    )


def images(model: str, size: int, batch_size: int, count: int, lr: float, epoch_batches: int | None) -> Workload:
    """Return a ResNet on made-up images."""
    count = count if epoch_batches is None else batch_size * epoch_batches
    return Workload(
        batch_size=batch_size,
        model=partial(samples.resnet, model),
        tensors=partial(samples.image_tensors, size, count),
        dataset=partial(samples.images, size, count),
        lr=lr,
        momentum=0.9,
        loss=nn.CrossEntropyLoss(),
        model_overrides=(f"model={model}",),
        data_overrides=("data=fake_images", f"data.image_size={size}", f"data.num_samples={count}"),
        level_samples=32,
    )


def resnet18_500mb(epoch_batches: int | None) -> Workload:
    """Return ResNet-18 on small images, with as much state as a larger model has."""
    conf = f"--config-dir={ROOT / 'benchmarks' / 'conf'}"
    small = images("resnet18", 32, 8, 1600, 1e-4, epoch_batches)
    return replace(small, model=samples.WithTable, adam=True, model_overrides=(conf, "model=resnet18_500mb"))


def resnet50_gpu(epoch_batches: int | None) -> Workload:
    """Return ResNet-50 at its usual size, in bfloat16 and channels-last order."""
    return Workload(
        batch_size=64,
        model=partial(samples.resnet, "resnet50", channels_last=True),
        tensors=partial(samples.image_tensors, 224, 2560),
        dataset=partial(samples.images, 224, 2560),
        lr=0.01,
        momentum=0.9,
        loss=nn.CrossEntropyLoss(),
        model_overrides=("model=resnet50_gpu",),
        level_samples=64,
        bfloat16=True,
    )


def transformer(epoch_batches: int | None) -> Workload:
    """Return a small transformer in bfloat16."""
    return Workload(
        batch_size=32,
        model=samples.Transformer,
        tensors=samples.tokens,
        lr=0.01,
        momentum=0.9,
        loss=nn.CrossEntropyLoss(),
        model_overrides=("model=transformer",),
        bfloat16=True,
    )


class NextToken(nn.Module):
    """The mean cross-entropy over the tokens that follow."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def gpt(layers: int, width: int, batch_size: int, epoch_batches: int | None) -> Workload:
    """Return a decoder-only transformer on the topics of Python's ``help()``."""
    return Workload(
        batch_size=batch_size,
        model=partial(GPT, layers=layers, width=width, context=samples.CONTEXT),
        tensors=samples.windows,
        lr=1e-3,
        momentum=0.0,
        loss=NextToken(),
        model_overrides=("model=gpt", f"model.layers={layers}", f"model.width={width}"),
        data_overrides=("data=text", f"data.context={samples.CONTEXT}"),
        level_samples=8,
        adam=True,
        sharded=True,
    )


WORKLOADS: dict[str, Callable[[int | None], Workload]] = {
    "toy": toy,
    "mnist": mnist,
    "resnet18": partial(images, "resnet18", 64, 16, 1600, 0.01),
    "resnet18_500mb": resnet18_500mb,
    # Short steps, for checkpoints: all that counts are its weights.
    "resnet50": partial(images, "resnet50", 32, 2, 480, 1e-5),
    "resnet50_gpu": resnet50_gpu,
    "transformer": transformer,
    # 1 and 10.8 million parameters.
    "gpt_1m": partial(gpt, 5, 128, 4),
    "gpt_10m": partial(gpt, 6, 384, 4),
}


def get(name: str, epoch_batches: int | None = None) -> Workload:
    """Return a workload; where its data are made up, with so many batches an epoch (all ranks together)."""
    return WORKLOADS[name](epoch_batches)
