"""Metrics that give a value for each sample, and what a metric of any kind gives."""

from typing import Any

import torch
from torch import Tensor

from ddp_recipes.devices import for_sums
from ddp_recipes.errors import RequestError


def is_stateful(metric: object) -> bool:
    """Whether a metric keeps its own state over batches and ranks, as torchmetrics' do."""
    return hasattr(metric, "update") and hasattr(metric, "compute")


def of_samples(name: str, value: Any, samples: int) -> Tensor:
    """Return what a metric gives for so many samples as a value of each, [n], or as a scalar, the mean over all.

    Raises:
        RequestError: it is no number and no tensor.
    """
    if not isinstance(value, (Tensor, int, float)):
        raise RequestError(
            f"The metric {name} is a {type(value).__name__}. Return a tensor with a value for each sample, [n], or a "
            f"number, the mean over them."
        )
    found = for_sums(torch.as_tensor(value))
    found = found.flatten(1).mean(dim=1) if found.dim() > 1 else found
    return found.squeeze(0) if found.shape == (1,) and samples > 1 else found


def summed(value: Tensor, samples: int) -> Tensor:
    """Return the sum of what :func:`of_samples` gave over so many samples, and how many they are, [2]."""
    total, count = (value.sum(), len(value)) if value.dim() else (value * samples, samples)
    return torch.stack([total, torch.full_like(total, count)])


class Accuracy:
    """Fraction of targets whose class has the highest of C outputs. Targets int64 [n, ...].

    All targets count, also those that a loss leaves out (``ignore_index``): torchmetrics' ``MulticlassAccuracy`` leaves
    them out, too, where it is told.

    Args:
        dim: of the outputs that has the classes; ``None``: 1, as losses of torch have it, [n, C, ...], or the last one,
            as models of language have it, [n, ..., C], whichever goes with the targets.
    """

    def __init__(self, dim: int | None = None) -> None:
        self.dim = dim

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return for each sample the mean over its targets (one; pixels, tokens), [n]."""
        found = outputs.argmax(dim=self._dim(outputs.shape, targets.shape) if self.dim is None else self.dim)
        if found.shape != targets.shape:  # which torch would broadcast
            raise RequestError(
                f"Accuracy takes the number of a class for each that the model finds, {list(found.shape)} here, and "
                f"the targets are {list(targets.shape)}, {targets.dtype}. Leave it out, or write a metric of your own."
            )
        return for_sums(found == targets).unsqueeze(-1).flatten(1).mean(dim=1)

    def _dim(self, outputs: torch.Size, targets: torch.Size) -> int:
        second, last = outputs[:1] + outputs[2:] == targets, outputs[:-1] == targets
        if len(outputs) > 2 and second and last:
            raise RequestError(
                f"Accuracy: either dimension of outputs {list(outputs)} may have the classes, for targets "
                f"{list(targets)}. Set its dim: 1 as for losses of torch, -1 for models of language."
            )
        return 1 if second or not last else -1


class MeanAbsoluteError:
    """Mean of |output - target| over a sample's values. Both [n, ...]."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return one mean for each sample, [n]."""
        if outputs.shape != targets.shape:  # which torch would broadcast
            raise RequestError(
                f"MeanAbsoluteError compares element by element, but the outputs are {list(outputs.shape)} and the "
                f"targets {list(targets.shape)}. Give both one shape, or write a metric of your own."
            )
        return for_sums((outputs - targets).abs().unsqueeze(-1).flatten(1)).mean(dim=1)
