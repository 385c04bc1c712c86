"""Memory of tensors, and operations on many tensors at once."""

from collections.abc import Sequence

import torch
from torch import Tensor


def storage_key(tensor: Tensor) -> int:
    """Return a number of the memory that a tensor lies in, the same for all its views: ``UntypedStorage._cdata``.

    A storage's public ``data_ptr()`` is no way around it: without data, on ``meta`` or fake, it is the same for all.
    """
    key: int = tensor.untyped_storage()._cdata
    return key


def writes(tensor: Tensor) -> int:
    """Return how often a tensor has been written to in place: ``Tensor._version``; 0 where nobody counts."""
    return 0 if tensor.is_inference() else tensor._version


def viewed(tensor: Tensor) -> Tensor | None:
    """Return the tensor that another one is a view of, which it keeps: ``Tensor._base``."""
    return tensor._base


def bytes_of(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes, uint8 [bytes], in its own memory if they lie there in order.

    One with a single number is contiguous whatever its strides are, which ``view`` still refuses.
    """
    whole = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)


def laid_out_as(value: Tensor, like: Tensor) -> Tensor:
    """Return a tensor that lies in memory as another one of its shape does: itself, or a copy.

    Fused optimizers go through a parameter, its gradient and its state as they lie there, and take no other notice.
    """
    if value.stride() == like.stride():
        return value
    return torch.empty_like(like, dtype=value.dtype, device=value.device).copy_(value)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a ``DTensor``, as it lies in memory; any other tensor is whole. Loads no DTensor."""
    return tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[attr-defined]


def whole(tensor: Tensor) -> Tensor:
    """Return a ``DTensor`` put together, on every rank; any other tensor is whole. A collective."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def copy_each(into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy tensors into others, in one kernel where there is ``torch._foreach_copy_``."""
    if hasattr(torch, "_foreach_copy_"):
        torch._foreach_copy_(list(into), list(values))
        return
    with torch.no_grad():
        for tensor, value in zip(into, values, strict=True):
            tensor.copy_(value)


def add_each(into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Add tensors to others in place, in one kernel where there is ``torch._foreach_add_``."""
    if hasattr(torch, "_foreach_add_"):
        torch._foreach_add_(list(into), list(values))
        return
    with torch.no_grad():
        for tensor, value in zip(into, values, strict=True):
            tensor.add_(value)


def norm_of_each(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the norms of tensors on one device, in one kernel where there is ``torch._foreach_norm``."""
    if hasattr(torch, "_foreach_norm"):
        return list(torch._foreach_norm(list(tensors)))
    return [torch.linalg.vector_norm(tensor) for tensor in tensors]
