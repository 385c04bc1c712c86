"""Numeric precision of a step: what dtype the model has, where autocast is on, and how a loss is scaled."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_recipes._compat.torch_ import note_step, ready_for_late_gradients
from ddp_recipes.runtime.phases import CALLS

_WHOLE = {"bf16-true": torch.bfloat16, "64-true": torch.float64}


def whole_dtype(name: str) -> torch.dtype | None:
    """Return the dtype that a model, its optimizer's state and its batches have; ``None``: what they come in."""
    return _WHOLE.get(name)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Let tensors that are made without a dtype have this one."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Precision:
    """Of 32 bits throughout, or of what the model has."""

    def forward(self, cached: bool = True) -> AbstractContextManager[Any]:
        """Return the context of a forward pass.

        Args:
            cached: whether weights that are cast may be kept to its end: they do not change within it.
        """
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Run backward."""
        CALLS.backward(loss)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Make gradients those of the unscaled loss, for clipping and for their norm."""

    def step(self, optimizer: torch.optim.Optimizer, gradients: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Step the optimizer, which calls what computes the gradients first, where they are not there yet."""
        if gradients is None:
            if options or not getattr(optimizer, "takes_late_gradients", False):  # by itself, on its fast path
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


class Whole(Precision):
    """One dtype throughout: what a model makes in its forward pass has it as well."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def forward(self, cached: bool = True) -> AbstractContextManager[Any]:
        """Make it the default."""
        return default_dtype(self.dtype)


class BFloat16(Precision):
    """Autocast to bfloat16; its range is that of float32, so nothing needs scaling."""

    dtype = torch.bfloat16

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type

    def forward(self, cached: bool = True) -> AbstractContextManager[Any]:
        """Autocast."""
        return torch.autocast(self.device_type, self.dtype, cache_enabled=cached)


class Float16(BFloat16):
    """Autocast to float16, the loss scaled so that small gradients do not vanish (torch's ``GradScaler``)."""

    dtype = torch.float16

    def __init__(self, device_type: str) -> None:
        super().__init__(device_type)
        self.scaler = torch.amp.GradScaler(device_type)

    def backward(self, loss: Tensor) -> None:
        """Run backward from the scaled loss."""
        CALLS.backward(self.scaler.scale(loss))

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide gradients by the scale."""
        self.scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, gradients: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Step unless a gradient overflowed, then adapt the scale."""
        result = None if gradients is None else gradients()
        ready_for_late_gradients(optimizer)
        self.scaler.step(optimizer, **options)
        self.scaler.update()
        note_step(optimizer)
        return result

    def state(self) -> dict[str, Any]:
        """Return the scaler's state."""
        return self.scaler.state_dict()

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the scaler's state."""
        self.scaler.load_state_dict(state)


class ShardedFloat16(Float16):
    """float16 with a scaled loss where each rank has a shard of the gradients: an overflow on one counts on all."""

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
    """Return the precision of that name: ``32-true``, ``bf16-mixed``, ``16-mixed``, ``bf16-true`` or ``64-true``.

    Args:
        whole_model: whether each rank has the gradients of the whole model.
    """
    if name == "32-true":
        return Precision()
    if (dtype := whole_dtype(name)) is not None:
        return Whole(dtype)
    return {"bf16-mixed": BFloat16, "16-mixed": Float16 if whole_model else ShardedFloat16}[name](device_type)
