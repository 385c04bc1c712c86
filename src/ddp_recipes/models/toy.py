"""The toy model of PyTorch's "Getting Started with Distributed Data Parallel", on one device and on two."""

from collections.abc import Sequence

from torch import Tensor, nn

from ddp_recipes.models.placement import Device, two_devices


class Toy(nn.Module):
    """Two linear layers with a ReLU between.

    Input ``[n, ...]`` of ``in_features`` values a sample, output ``[n, out_features]``.
    """

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
