"""A user's own modules for runs over several devices."""

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
