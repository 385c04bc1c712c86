"""Gradients and buffers in flat buckets, for collectives of fewer and larger messages."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_recipes._compat.tensors import bytes_of

BUCKET = 25 << 20  # bytes that are exchanged together


def in_buckets(gradients: Sequence[Tensor], reduce: Callable[[Tensor], object]) -> None:
    """Put in the place of gradients what ``reduce`` makes of them, in tensors of 25 MB or one gradient."""
    for bucket in _buckets(gradients, lambda gradient: gradient.dtype):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        reduce(flat)
        totals = torch.split(flat, [each.numel() for each in bucket])
        for gradient, total in zip(bucket, totals, strict=True):
            gradient.copy_(total.view_as(gradient))


@torch.no_grad()
def broadcast_each(buffers: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Give tensors of any dtypes the values of the group's first rank, in messages of 25 MB or one tensor.

    A collective: the tensors are alike on all ranks, but for the devices that they lie on.
    """
    largest_first = sorted(buffers, key=lambda each: -each.dtype.itemsize)  # so each is aligned in the bytes of all
    for bucket in _buckets(largest_first, lambda each: each.device):
        flat = torch.cat([bytes_of(each) for each in bucket])
        dist.broadcast(flat, group=group, group_src=0)
        if dist.get_rank(group) != 0:
            for each, content in zip(bucket, torch.split(flat, [each.nbytes for each in bucket]), strict=True):
                each.copy_(content.view(each.dtype).view(each.shape))


def _buckets(tensors: Sequence[Tensor], kind: Callable[[Tensor], Hashable]) -> Iterator[list[Tensor]]:
    """Yield tensors of one kind that go together."""
    for one in dict.fromkeys(map(kind, tensors)):
        bucket: list[Tensor] = []
        for tensor in tensors:
            if kind(tensor) != one:
                continue
            if bucket and sum(each.nbytes for each in bucket) + tensor.nbytes > BUCKET:
                yield bucket
                bucket = []
            bucket.append(tensor)
        yield bucket
