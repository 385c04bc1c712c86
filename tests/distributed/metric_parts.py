"""Metrics of a user: one that keeps all that it saw, and one whose states take their form from that."""

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat


class Kept(Metric):
    """The share of samples whose class has the highest score, from lists of scores and of classes."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("scores", default=[], dist_reduce_fx="cat")
        self.add_state("classes", default=[], dist_reduce_fx="cat")

    def update(self, scores: Tensor, classes: Tensor) -> None:
        self.scores.append(scores)
        self.classes.append(classes)

    def compute(self) -> Tensor:
        scores, classes = dim_zero_cat(self.scores), dim_zero_cat(self.classes)
        assert not classes.is_floating_point()
        return torch.mean((scores.argmax(dim=1) == classes).double()) + len(classes)


class Wide(Metric):
    """The largest error, in 64 bits, and of all outputs the share that is within one, counted for each."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("largest", default=torch.tensor(0.0), dist_reduce_fx="max")
        self.add_state("near", default=torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("count", default=torch.tensor(0), dist_reduce_fx="sum")

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        errors = (outputs - targets).double().abs()
        self.largest = torch.maximum(self.largest, errors.amax(dim=0))
        self.near = self.near + (errors < 1).sum(dim=0)
        self.count += len(targets)

    def compute(self) -> Tensor:
        return self.largest.max() + (self.near / self.count).mean()
