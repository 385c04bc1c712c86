"""Optimizers with a mode for training and one for evaluation, in which they leave other weights in the model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ddp_recipes.callbacks.ema import Evaluated

__all__ = ["OptimizerModes"]


class OptimizerModes(Evaluated):
    """Train in an optimizer's one mode; validate, save and end in its other one.

    Schedule-free optimizers want it so (Defazio et al., "The Road Less Scheduled", 2024; the package ``schedulefree``).
    A run whose config names one has this by itself.

    Args:
        optimizers: ``train()`` puts the weights in the model that their steps need, ``eval()`` those to evaluate.
    """

    def __init__(self, optimizers: Sequence[Any]) -> None:
        super().__init__()
        self.optimizers = optimizers

    def called(self, name: str) -> str:
        return f"optimizer._target_={type(self.optimizers[0]).__name__}"

    def on_start(self, directory: Path | None, task: nn.Module) -> None:
        """Train in the mode for it."""
        super().on_start(directory, task)
        self.begun = True

    def swap(self, swapped: bool) -> None:
        """Change the mode. What it was before is put back as it was, for the way there and back rounds."""
        parameters = self.parameters()
        if swapped:
            self.aside = {name: each.detach().clone() for name, each in parameters.items()}
        for optimizer in self.optimizers:
            optimizer.eval() if swapped else optimizer.train()
        if not swapped:
            for name, each in parameters.items():
                each.copy_(self.aside[name])
            self.aside = {}
