"""Metrics of a user: one that keeps all that it saw, and one whose sum takes its form from that."""

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
    """The mean squared error, summed in 64 bits, from a sum that begins in 32."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", default=torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("count", default=torch.tensor(0), dist_reduce_fx="sum")

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.total = self.total + (outputs - targets).double().square().sum(dim=0)
        self.count += len(targets)

    def compute(self) -> Tensor:
        return (self.total / self.count).mean()
