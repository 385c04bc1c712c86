"""What tensors take: followed while they come and go, kept by autograd, or held at one time.

And what torch does on devices that are there, done for those that are not.
"""

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ddp_recipes._compat.dispatch import OpOverload, TorchDispatchMode
from ddp_recipes._compat.torch_ import storage_key, tree_leaves
from ddp_recipes.devices import HOST
from ddp_recipes.training.precision import make_precision

Bytes = Counter[torch.device]


class MemoryTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the memory of tensors: what there is on each device, and the most there was."""

    def __init__(self, rounded: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rounded = rounded
        self.allocated: Bytes = Counter()
        self.peak: Bytes = Counter()
        self._known: dict[int, weakref.ref[Any]] = {}

    def add(self, tensors: Iterable[Any]) -> None:
        """Take in the memory of tensors that is not known yet; note when it is freed."""
        for tensor in tensors:
            if not isinstance(tensor, Tensor):
                continue
            storage, device = tensor.untyped_storage(), tensor.device
            key = storage_key(tensor)
            if key in self._known:
                continue
            size = -(-storage.nbytes() // self.rounded) * self.rounded

            def freed(_: Any, key: int = key, device: torch.device = device, size: int = size) -> None:
                del self._known[key]
                self.allocated[device] -= size

            self._known[key] = weakref.ref(storage, freed)
            self.allocated[device] += size
            self.peak[device] = max(self.peak[device], self.allocated[device])

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Count no memory for tensors: they stand for others, which are not there all the time."""
        self._known |= {storage_key(tensor): weakref.ref(tensor.untyped_storage()) for tensor in tensors}

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        self.add(tree_leaves(output))
        return output


class Saved(saved_tensors_hooks):
    """Counts what autograd keeps for the backward pass, each memory once, but for what is known.

    Args:
        known: as :func:`storages` gives it.
    """

    def __init__(self, known: Iterable[int]) -> None:
        super().__init__(self._pack, lambda saved: saved)
        self.known = set(known)
        self.bytes: Bytes = Counter()

    def _pack(self, tensor: Tensor) -> Tensor:
        key = storage_key(tensor)
        # What is on meta takes no memory. It may go at once, and its place in memory to another tensor.
        if key not in self.known and tensor.device.type != "meta":
            self.known.add(key)
            self.bytes[tensor.device] += tensor.untyped_storage().nbytes()
        return tensor.detach()  # or an output would keep its own graph


def bytes_of(tensors: Iterable[Any], besides: Iterable[Tensor] = ()) -> Bytes:
    """Return the bytes of the memory of tensors by device, each memory once; other values are left out."""
    counted: Bytes = Counter()
    known = set(storages(besides))
    for tensor in tensors:
        if isinstance(tensor, Tensor) and storage_key(tensor) not in known:
            known.add(storage_key(tensor))
            counted[tensor.device] += tensor.untyped_storage().nbytes()
    return counted


def storages(tensors: Iterable[Any]) -> Iterator[int]:
    """Return which memory each tensor lies in."""
    return (storage_key(tensor) for tensor in tensors if isinstance(tensor, Tensor))


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
