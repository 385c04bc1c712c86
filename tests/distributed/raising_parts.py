"""Parts of which one raises, on one rank, from the second optimizer step on: as ``RAISES`` names place and rank."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ddp_recipes import Callback

MESSAGE = "the cat sat on the keyboard"
steps = 0  # that are done, in this process


def may_raise(place: str) -> None:
    """Raise if it is this place's turn, as an error that came of another one; leave a file that says so."""
    where, rank, mark = os.environ["RAISES"].split(",")
    if place == where and steps >= 2 and int(rank) == (dist.get_rank() if dist.is_initialized() else 0):
        Path(mark).touch()
        try:
            raise KeyError("the cat saw a mouse")
        except KeyError as error:
            raise RuntimeError(f"{MESSAGE} in {place}") from error


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradients: Tensor) -> Tensor:
        may_raise("backward")
        return gradients


class Block(nn.Linear):
    """Raises forward or backward."""

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training and not inputs.is_meta:
            may_raise("forward")
        outputs: Tensor = _Backward.apply(super().forward(inputs))
        return outputs


class Saved(Block):
    """Raises as its state is asked for."""

    def get_extra_state(self) -> int:
        may_raise("save")
        return 1

    def set_extra_state(self, state: int) -> None:
        pass


class Model(nn.Sequential):
    """Three of them."""

    def __init__(self, in_features: int, out_features: int) -> None:
        block = Saved if os.environ["RAISES"].startswith("save,") else Block
        super().__init__(block(in_features, 16), nn.Tanh(), block(16, 16), nn.Tanh(), block(16, out_features))


class Loss(nn.MSELoss):
    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        may_raise("loss")
        return super().forward(outputs, targets)


class Metric:
    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        may_raise("metric")
        return (outputs - targets).abs().mean(dim=1)


class Data(TensorDataset):
    def __init__(self, num_samples: int, in_features: int, out_features: int, seed: int, split: str) -> None:
        generator = torch.Generator().manual_seed(seed)
        sizes = (in_features, out_features)
        super().__init__(*(torch.randn(num_samples, size, generator=generator) for size in sizes))

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        may_raise("data")
        return super().__getitem__(index)


class Counting(Callback):
    """Counts the steps, and raises in one of its events, or in a step of the optimizer."""

    def on_start(self, directory: Path | None, task: nn.Module) -> None:
        for optimizer in self.run.optimizers:
            optimizer.register_step_pre_hook(lambda *_: may_raise("optimizer"))

    def on_step(self, step: int) -> None:
        global steps
        steps = step
        may_raise("callback")

    def on_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        may_raise("validation callback")
