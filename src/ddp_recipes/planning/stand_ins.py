"""What stands in for devices that are not there: tensors without data, and what torch does on such a device."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

DTYPES = {"32-true": None, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def new_mode() -> FakeTensorMode:
    """Return what makes tensors without data."""
    # As in model_parallel.rehearsal: before there are devices that are not there, so that no thread is started.
    torch.zeros((), requires_grad=True).backward()  # type: ignore[no-untyped-call]
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_batch(sample: Any, size: int, device: torch.device) -> Any:
    """Return a batch of so many samples like the one in a batch of one."""

    def fake(tensor: Tensor) -> Tensor:
        shape = (size, *tensor.shape[1:]) if tensor.dim() else tensor.shape
        return torch.empty(shape, dtype=tensor.dtype, device=device)

    return tree_map_only(Tensor, fake, sample)


@contextmanager
def autocast(device_type: str, dtype: torch.dtype | None, *, cached: bool = True) -> Iterator[None]:
    """Do what ``torch.autocast`` does, which does nothing for CUDA where there is no driver."""
    if dtype is None:
        yield
        return
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(cached)
    torch.set_autocast_dtype(device_type, dtype)
    torch.set_autocast_enabled(device_type, True)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()
        torch.set_autocast_enabled(device_type, False)
        torch.set_autocast_cache_enabled(before)


def as_on(optimizer: torch.optim.Optimizer, device_type: str) -> None:
    """Choose what torch chooses on GPUs: one operation for all tensors, which takes more memory at a time.

    One kernel takes no more memory than a tensor after the other does, and cannot run without data.
    """
    for group in optimizer.param_groups:
        if group.get("fused"):
            group.update(fused=False, foreach=False)
        elif device_type == "cuda" and group.get("foreach", False) is None:
            group["foreach"] = True
