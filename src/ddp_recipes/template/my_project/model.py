"""The model: an ordinary ``nn.Module``. Its loss and metrics are the task's, conf/config.yaml says which."""

from torch import Tensor, nn


class Net(nn.Module):
    """Two hidden layers. The arguments are the keys of conf/model/net.yaml."""

    def __init__(self, in_features: int, hidden_features: int, out_features: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(in_features, hidden_features),
            nn.ReLU(),
            nn.Linear(hidden_features, hidden_features),
            nn.ReLU(),
            nn.Linear(hidden_features, out_features),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layers(inputs)
        return outputs
