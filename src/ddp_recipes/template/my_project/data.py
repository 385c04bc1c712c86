"""The data: an ordinary ``Dataset``, with a length, and a pair of input and target for each index."""

import math

import torch
from torch import Tensor
from torch.utils.data import Dataset


class Spirals(Dataset[tuple[Tensor, Tensor]]):
    """Points of spirals, one class each, made on the spot. The arguments are the keys of conf/data/spirals.yaml."""

    def __init__(self, split: str, num_samples: int, num_classes: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(2 * seed + (split == "train"))
        self.targets = torch.arange(num_samples) % num_classes
        radius = torch.rand(num_samples, generator=generator)
        angle = 2 * math.pi * (radius + self.targets / num_classes)
        angle += 0.1 * torch.randn(num_samples, generator=generator)
        self.inputs = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]
