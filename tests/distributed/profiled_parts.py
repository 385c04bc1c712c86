"""Parts that sleep, each where another phase of a step has to show it, and somebody else's profiler."""

import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ddp_recipes import Callback
from ddp_recipes.datasets import random_regression
from ddp_recipes.models import Toy


class SleepsForward(Toy):
    """Takes its time in training."""

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            time.sleep(0.03)
        return super().forward(inputs)


class SleepsInEvaluation(Toy):
    """Takes its time, but not in training."""

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.training:
            time.sleep(0.5)
        return super().forward(inputs)


class SleepySamples(Dataset[tuple[Tensor, ...]]):
    """Are fetched one by one, each after a while."""

    def __init__(self, **size: Any) -> None:
        self.all = random_regression(**size)

    def __len__(self) -> int:
        return len(self.all)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        time.sleep(0.005)
        return self.all[index]


class Ranges(Callback):
    """Notes the names of what a profiler of its own sees."""

    def __init__(self, file: str) -> None:
        self.file = Path(file)

    def on_start(self, directory: Path | None, task: torch.nn.Module) -> None:
        self.profile = torch.profiler.profile()
        self.profile.start()

    def on_end(self) -> None:
        self.profile.stop()
        self.file.write_text(json.dumps([event.name for event in self.profile.events()]))
