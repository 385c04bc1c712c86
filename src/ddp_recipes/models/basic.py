"""Small models: a linear layer, a multi-layer perceptron, and the toy model on one device and on two.

Each takes inputs ``[n, ...]`` of ``in_features`` values a sample and returns ``[n, out_features]``.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from ddp_recipes.errors import RequestError

Device = torch.device | str | int


class Linear(nn.Linear):
    """``nn.Linear`` over everything after the batch dimension, so that images fit as well."""

    def __init__(self, in_features: int = 10, out_features: int = 1) -> None:
        super().__init__(in_features, out_features)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.flatten(1))


class MLP(nn.Module):
    """Linear layers with a ReLU between each two; as many hidden layers as there are ``hidden_features``."""

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


class Toy(nn.Module):
    """Two linear layers with a ReLU between, as in PyTorch's "Getting Started with Distributed Data Parallel"."""

    def __init__(self, in_features: int = 10, hidden_features: int = 10, out_features: int = 5) -> None:
        super().__init__()
        self.net1 = nn.Linear(in_features, hidden_features)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(hidden_features, out_features)

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self.net2(self.relu(self.net1(input.flatten(1))))
        return output


class ToyMP(Toy):
    """``Toy`` with ``net1`` on the first of two devices and ``net2``, hence the output, on the second.

    State dict and, from the same seed, initial weights are those of ``Toy``.
    """

    def __init__(
        self, devices: Sequence[Device], in_features: int = 10, hidden_features: int = 10, out_features: int = 5
    ) -> None:
        first, second = two_devices("ToyMP", devices)
        super().__init__(in_features, hidden_features, out_features)
        self.net1.to(first)
        self.net2.to(second)

    def forward(self, input: Tensor) -> Tensor:
        # Ask the weights where they are: a copy of the model may have been moved since it was made.
        hidden = self.relu(self.net1(input.flatten(1).to(self.net1.weight.device)))
        output: Tensor = self.net2(hidden.to(self.net2.weight.device))
        return output


def two_devices(model: str, devices: Sequence[Device]) -> tuple[torch.device, torch.device]:
    """Return ``devices`` as the two that a replica of ``model`` spans; the same one twice is fine.

    Raises:
        RequestError: there are not two.
    """
    if len(devices) != 2:
        given = ", ".join(map(str, devices)) or "none"
        raise RequestError(
            f"{model} spans 2 devices and was given {len(devices)} ({given}). "
            "Set model.num_devices=2, or choose the model without '_mp', which needs one device."
        )
    return torch.device(devices[0]), torch.device(devices[1])
