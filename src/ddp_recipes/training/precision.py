"""Numeric precision of a step: where autocast is on, and how a loss is scaled."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_recipes._compat.optimizers import ready_for_late_gradients
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

    def step(self, optimizer: torch.optim.Optimizer, gradients: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Step the optimizer, which calls what computes the gradients first, where they are not there yet."""
        if gradients is None:
            ready_for_late_gradients(optimizer)
            return optimizer.step(**options)

        def closure() -> Any:
            result = gradients()
            ready_for_late_gradients(optimizer)
            return result

        return optimizer.step(closure=closure, **options)

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

    def step(self, optimizer: torch.optim.Optimizer, gradients: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Step unless a gradient overflowed, then adapt the scale."""
        result = None if gradients is None else gradients()
        ready_for_late_gradients(optimizer)
        self.scaler.step(optimizer, **options)
        self.scaler.update()
        return result

    def state(self) -> dict[str, Any]:
        """Return the scaler's state."""
        return self.scaler.state_dict()

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the scaler's state."""
        self.scaler.load_state_dict(state)


class ShardedFloat16(Float16):
    """The same where each rank has a part of the gradients: what overflows on one rank counts on all."""

    def __init__(self, device_type: str) -> None:
        super().__init__(device_type)
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler  # takes long to load

        self.scaler = ShardedGradScaler(device_type, process_group=dist.group.WORLD)
        self.unscaled = False

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide gradients by the scale. A collective."""
        super().unscale(optimizer)
        self.unscaled = True

    def step(self, optimizer: torch.optim.Optimizer, gradients: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Step unless a gradient overflowed anywhere. A collective."""
        result = None if gradients is None else gradients()
        if not self.unscaled:  # a fused optimizer would do it by itself, and look at its own gradients alone
            self.unscale(optimizer)
        self.unscaled = False
        super().step(optimizer, **options)
        return result


def make_precision(name: str, device_type: str, whole_model: bool = True) -> Precision:
    """Return the precision of that name: ``32-true``, ``bf16-mixed`` or ``16-mixed``.

    Args:
        whole_model: whether each rank has the gradients of the whole model.
    """
    if name == "32-true":
        return Precision()
    return {"bf16-mixed": BFloat16, "16-mixed": Float16 if whole_model else ShardedFloat16}[name](device_type)
