"""Numeric precision of a step: where autocast is on, and how a loss is scaled."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ddp_recipes.runtime.fast_paths import backward


class Precision:
    """32-bit throughout."""

    def forward(self) -> AbstractContextManager[Any]:
        """Return the context of a forward pass."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Run backward."""
        backward(loss)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Make gradients those of the unscaled loss, for clipping and for their norm."""

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Step the optimizer."""
        optimizer.step()

    def state(self) -> dict[str, Any]:
        """Return what a resume needs."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state` returned."""


class BFloat16(Precision):
    """Autocast to bfloat16; its range is that of float32, so nothing needs scaling."""

    dtype = torch.bfloat16

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type

    def forward(self) -> AbstractContextManager[Any]:
        """Autocast."""
        return torch.autocast(self.device_type, self.dtype)


class Float16(BFloat16):
    """Autocast to float16, the loss scaled so that small gradients do not vanish (torch's ``GradScaler``)."""

    dtype = torch.float16

    def __init__(self, device_type: str) -> None:
        super().__init__(device_type)
        self.scaler = torch.amp.GradScaler(device_type)

    def backward(self, loss: Tensor) -> None:
        """Run backward from the scaled loss."""
        backward(self.scaler.scale(loss))

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide gradients by the scale."""
        self.scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Step unless a gradient overflowed, then adapt the scale."""
        self.scaler.step(optimizer)
        self.scaler.update()

    def state(self) -> dict[str, Any]:
        """Return the scaler's state."""
        return self.scaler.state_dict()

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the scaler's state."""
        self.scaler.load_state_dict(state)


def make_precision(name: str, device_type: str) -> Precision:
    """Return the precision of that name: ``32-true``, ``bf16-mixed`` or ``16-mixed``."""
    if name == "32-true":
        return Precision()
    return {"bf16-mixed": BFloat16, "16-mixed": Float16}[name](device_type)
