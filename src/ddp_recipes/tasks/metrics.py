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
        RequestError: it is neither a number nor a tensor.
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
    """Fraction of targets whose class has the highest of C outputs, [n, C, ...] or [n, ..., C]; targets int64 [n, ...].

    All targets count, also those that a loss leaves out (``ignore_index``): torchmetrics' ``MulticlassAccuracy`` leaves
    them out, too, where it is told.

    Attributes:
        last: whether it is the last dimension of outputs ``[n, k, k]`` that has the classes; else the second, as losses
            of torch have it. Of others the targets' shape tells.
    """

    last = False

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return for each sample the mean over its targets (one; pixels, tokens), [n]."""
        of_last, of_second = outputs.shape[:-1] == targets.shape, outputs.shape[:1] + outputs.shape[2:] == targets.shape
        if not (of_last or of_second):  # which torch would broadcast
            raise RequestError(
                f"Accuracy takes the number of a class for each that the model finds. Its outputs are "
                f"{list(outputs.shape)} here, and the targets {list(targets.shape)}, {targets.dtype}. Leave it out, or "
                f"write a metric of your own."
            )
        found = outputs.argmax(dim=-1 if of_last and (self.last or not of_second) else 1)
        return for_sums(found == targets).unsqueeze(-1).flatten(1).mean(dim=1)


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
