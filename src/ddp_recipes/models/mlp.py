"""A multi-layer perceptron."""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn


class MLP(nn.Module):
    """Linear layers with a ReLU between each two; as many hidden layers as there are ``hidden_features``.

    Input ``[n, ...]`` of ``in_features`` values a sample, output ``[n, out_features]``.
    """

    def __init__(
        self, in_features: int = 784, hidden_features: Sequence[int] = (10, 10), out_features: int = 10
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for size, next_size in pairwise([in_features, *hidden_features, out_features]):
            layers += [nn.Linear(size, next_size), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self.layers(input.flatten(1))
        return output
