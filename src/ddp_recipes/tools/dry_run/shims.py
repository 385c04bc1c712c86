"""What torch does on devices that are there, done for those that are not."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ddp_recipes.devices import HOST
from ddp_recipes.training.precision import make_precision

_MIXED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


@contextmanager
def forward(device_type: str, precision: str, *, cached: bool = True) -> Iterator[None]:
    """Do what a precision does in a forward pass: ``torch.autocast`` does nothing for CUDA where there is no driver.

    Args:
        precision: as ``trainer.precision``.
    """
    if (dtype := _MIXED.get(precision)) is None:
        with make_precision(precision, device_type).forward():
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
        elif device_type != HOST and group.get("foreach", False) is None:
            group["foreach"] = True
