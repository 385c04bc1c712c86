"""Gradients in flat buckets, for collectives of fewer and larger messages."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

BUCKET = 25 << 20  # bytes of gradients that are exchanged together


def in_buckets(gradients: Sequence[Tensor], reduce: Callable[[Tensor], object]) -> None:
    """Put in the place of gradients what ``reduce`` makes of them, in tensors of 25 MB or one gradient."""
    for bucket in _buckets(gradients):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        reduce(flat)
        totals = torch.split(flat, [each.numel() for each in bucket])
        for gradient, total in zip(bucket, totals, strict=True):
            gradient.copy_(total.view_as(gradient))


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield gradients of one dtype that go together."""
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
        bucket: list[Tensor] = []
        for gradient in gradients:
            if gradient.dtype != dtype:
                continue
            if bucket and sum(each.nbytes for each in bucket) + gradient.nbytes > BUCKET:
                yield bucket
                bucket = []
            bucket.append(gradient)
        yield bucket
