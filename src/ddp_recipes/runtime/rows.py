"""Tensors of which some process has only some rows: what a sharded model is saved from, and loaded from."""

from dataclasses import dataclass
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


def rows_of(value: Tensor | Source, start: int, stop: int) -> Tensor:
    """Return rows of a tensor, wherever it is."""
    return value[start:stop] if isinstance(value, Tensor) else value.rows(start, stop)


def whole_of(value: Tensor | Source) -> Tensor:
    """Return all of a tensor, wherever it is."""
    return value if isinstance(value, Tensor) else value.rows(0, value.shape[0])
