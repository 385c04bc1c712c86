"""A model whose ranks all have something to say for rank 0's log."""

import logging
import os
from typing import Any

from torch import Tensor, nn


class Talkative(nn.Sequential):
    """Logs a warning, with a number of its own, for each batch."""

    def __init__(self, in_features: int, out_features: int, **unused: Any) -> None:
        super().__init__(nn.Linear(in_features, 64), nn.ReLU(), nn.Linear(64, out_features))
        self.said = 0

    def forward(self, x: Tensor) -> Tensor:
        self.said += 1
        logging.getLogger(__name__).warning("line %d of %d", self.said, int(os.getpid()))
        output: Tensor = super().forward(x)
        return output
