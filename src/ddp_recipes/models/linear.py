"""One linear layer."""

from torch import Tensor, nn


class Linear(nn.Linear):
    """``nn.Linear`` over everything after the batch dimension, so that images fit as well.

    Input ``[n, ...]`` of ``in_features`` values a sample, output ``[n, out_features]``.
    """

    def __init__(self, in_features: int = 10, out_features: int = 1) -> None:
        super().__init__(in_features, out_features)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.flatten(1))
