"""Data sets held in memory as two tensors."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ddp_recipes.datasets.transforms import Transform, runs_on_batches
from ddp_recipes.errors import RequestError


class InMemory(Dataset[tuple[Tensor, Tensor]]):
    """Samples in memory, fetched one by one or, where the transform allows it, by whole batches.

    ``inputs`` is ``[m, ...]`` and ``targets`` is ``[n, ...]``. Sample ``i`` has the input ``inputs[i]`` or, with
    ``rows`` (int64, ``[n]``), ``inputs[rows[i]]``, so that samples can share their inputs. ``transform`` is applied
    to the input. ``batched`` says whether ``fetch`` may be used.
    """

    def __init__(
        self, inputs: Tensor, targets: Tensor, transform: Transform | None = None, rows: Tensor | None = None
    ) -> None:
        if len(inputs if rows is None else rows) != len(targets):
            raise ValueError(f"{len(inputs if rows is None else rows)} inputs for {len(targets)} targets")
        self.inputs = inputs
        self.targets = targets
        self.transform = transform
        self.rows = rows
        self.batched = runs_on_batches(transform)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        target = self.targets[index]
        # A copy, as in fetch: a transform may work in place.
        input = self.inputs[index if self.rows is None else self.rows[index]].clone()
        return self._transformed(input), target

    def fetch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs ``[k, ...]`` and targets ``[k, ...]`` of the samples ``indices`` (int64, ``[k]``).

        The numbers are those of stacking ``self[i]``; only where ``batched`` is true.
        """
        rows = indices if self.rows is None else self.rows.index_select(0, indices)
        return self._transformed(self.inputs.index_select(0, rows)), self.targets.index_select(0, indices)

    def _transformed(self, inputs: Tensor) -> Any:
        if self.transform is None:
            return inputs
        result = self.transform(inputs)
        # torchvision's v2 transforms may give a subclass of Tensor; stacking samples would give a plain one.
        return result.as_subclass(torch.Tensor) if isinstance(result, torch.Tensor) else result


def balanced(dataset: Any) -> Tensor:
    """Return weights with which each class of ``dataset.targets`` is drawn equally often: one for each sample.

    Raises:
        RequestError: the data set has no ``targets``.
    """
    if not hasattr(dataset, "targets"):
        raise RequestError(
            f"{type(dataset).__name__} has no targets to balance. Give data.weights a function of your own."
        )
    _, classes, counts = np.unique(np.asarray(dataset.targets), return_inverse=True, return_counts=True)
    return torch.from_numpy(1 / counts[classes])
