"""Tensors of which some process has only some rows: what a sharded model is saved from, and loaded from."""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor


class Source(Protocol):
    """A whole tensor that need not be in memory: in a checkpoint's files, or as an initialisation gives it.

    Attributes:
        shape: of the whole.
        dtype: of its numbers.
    """

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def rows(self, start: int, stop: int) -> Tensor:
        """Return rows of it, [stop - start, ...], on the CPU, in memory of their own."""


@dataclass(frozen=True)
class OwnRows:
    """The rows of a tensor that this process has.

    Attributes:
        values: [rows, ...].
        start: the first one's number in the whole.
        shape: of the whole.
    """

    values: Tensor
    start: int
    shape: torch.Size


def copied(value: Tensor | OwnRows) -> Tensor | OwnRows:
    """Return a copy on the CPU."""
    if isinstance(value, OwnRows):
        return replace(value, values=value.values.to("cpu", copy=True))
    return value.detach().to("cpu", copy=True)


def rows_of(value: Tensor | Source, start: int, stop: int) -> Tensor:
    """Return rows of a tensor, wherever it is."""
    return value[start:stop] if isinstance(value, Tensor) else value.rows(start, stop)


def rows_here(value: Tensor | Source, like: Tensor) -> Tensor:
    """Return of a whole tensor what this rank has of another one of its shape: all, unless that is a ``DTensor``.

    What is of another shape has been taken out already.
    """
    mesh = getattr(like, "device_mesh", None)
    if mesh is None or value.shape != like.shape:
        return whole_of(value)
    start, stop = span(value.shape[0], mesh.get_coordinate()[-1], mesh.size(-1))
    return rows_of(value, start, stop)


def span(rows: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return a rank's first row and the one after its last, as ``torch.chunk`` and ``DTensor`` deal them."""
    each = -(-rows // ranks)
    return min(rank * each, rows), min((rank + 1) * each, rows)


def whole_of(value: Tensor | Source) -> Tensor:
    """Return all of a tensor, wherever it is."""
    return value if isinstance(value, Tensor) else value.rows(0, value.shape[0])
