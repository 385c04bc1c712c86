"""A user's own modules for runs over several devices."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


class Steps(nn.Module):
    """Passes a tuple, a dict and a keyword between its blocks, which are in a list."""

    def __init__(self, in_features: int, out_features: int, width: int = 8) -> None:
        super().__init__()
        self.start = nn.Linear(in_features, width)
        self.blocks = nn.ModuleList([Step(width), Step(width)])
        self.head = nn.Linear(width, out_features)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.start(inputs.flatten(1))
        state = {"pair": (hidden, hidden)}
        for block in self.blocks:
            state = block(state, scale=hidden.mean(dim=1, keepdim=True))
        output: Tensor = self.head(state["pair"][0])
        return output


class Step(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, state: dict[str, tuple[Tensor, Tensor]], *, scale: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        new, old = state["pair"]
        return {"pair": (self.norm(self.layer(new).tanh() * scale + old), new)}


class Around(Steps):
    """Adds around each of its blocks."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.start(inputs.flatten(1))
        for block in self.blocks:
            hidden = hidden + block({"pair": (hidden, hidden)}, scale=hidden)["pair"][0]
        output: Tensor = self.head(hidden)
        return output


class Sparing(Steps):
    """Fails where a backward pass has more of its blocks gathered than the one it comes to."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.start(inputs.flatten(1))
        for number, block in enumerate(self.blocks):
            hidden = block({"pair": (hidden, hidden)}, scale=hidden)["pair"][0]
            if hidden.requires_grad:
                hidden.register_hook(partial(self._check, number))
        output: Tensor = self.head(hidden)
        return output

    def _check(self, number: int, _: Tensor) -> None:
        parts = {at: [*block.parameters()] for at, block in enumerate(self.blocks)}
        whole = [at for at, each in parts.items() if not any(hasattr(part, "to_local") for part in each)]
        if whole != [number]:
            raise RuntimeError(f"gathered are {whole}, where the backward pass comes to {number}")


class _Grind(torch.autograd.Function):
    """Hands values on, and takes its time with gradients: what no count of the forward pass shows."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        work = torch.ones(400, 400)
        for _ in range(20):
            work = work @ work * 0
        return gradient + work[0, 0]


class Grinding(nn.Linear):
    """A layer whose backward pass takes most of a step."""

    def forward(self, inputs: Tensor) -> Tensor:
        return _Grind.apply(super().forward(inputs))  # type: ignore[no-any-return, no-untyped-call]


class Uneven(nn.Sequential):
    """Four layers with about as many weights, of which the first takes most of the time."""

    def __init__(self, in_features: int, out_features: int) -> None:
        layers = (nn.Linear(in_features, in_features) for _ in range(2))
        super().__init__(Grinding(in_features, in_features), *layers, nn.Linear(in_features, out_features))
