"""A user's own metric, which keeps all that it saw."""

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
