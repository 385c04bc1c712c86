"""What a user might bring: models, a data set and a callback, found by their dotted names."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

from ddp_recipes import Callback
from ddp_recipes.datasets import random_regression
from ddp_recipes.models import Toy


class Dropout(nn.Sequential):
    """Draws random numbers in training."""

    def __init__(self, in_features: int, hidden_features: int, out_features: int) -> None:
        hidden = nn.Linear(in_features, hidden_features)
        super().__init__(hidden, nn.Dropout(0.3), nn.ReLU(), nn.Linear(hidden_features, out_features))


class Norm(nn.Sequential):
    """Has buffers that follow each rank's own batches."""

    def __init__(self, in_features: int, hidden_features: int, out_features: int) -> None:
        hidden = nn.Linear(in_features, hidden_features)
        super().__init__(hidden, nn.BatchNorm1d(hidden_features), nn.ReLU(), nn.Linear(hidden_features, out_features))


class Spare(Toy):
    """Has a layer that it does not use."""

    def __init__(self, in_features: int, hidden_features: int, out_features: int) -> None:
        super().__init__(in_features, hidden_features, out_features)
        self.spare = nn.Linear(2, 2)


class Rooted(Toy):
    """Its gradient is 0 times infinity, which is no number."""

    def forward(self, input: Tensor) -> Tensor:
        output = super().forward(input)
        return output + (0 * output).sqrt()


class OneByOne(Dataset[tuple[Tensor, Tensor]]):
    """Random data read sample by sample, under a random transform."""

    def __init__(self, num_samples: int, in_features: int, out_features: int, seed: int, split: str) -> None:
        self.samples = random_regression(num_samples, in_features, out_features, seed, split)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.samples[index]
        return inputs + 0.1 * torch.randn_like(inputs), targets


class Notes(Callback):
    """Writes what each rank saw to ``folder/rank_<number>.json``."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.steps: list[int] = []
        self.validations: list[int] = []
        self.saves: list[int] = []

    def on_step(self, step: int) -> None:
        self.steps.append(step)

    def on_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        self.validations.append(step)

    def on_save(self, step: int) -> None:
        self.saves.append(step)

    def on_end(self) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        notes = {
            "steps": self.steps,
            "validations": self.validations,
            "saves": self.saves,
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        }
        (self.folder / f"rank_{rank}.json").write_text(json.dumps(notes))


class Lit(Toy):
    """A toy written for Lightning, as far as the loop needs it: steps that log, and an optimizer of its own."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        inputs, targets = batch
        return {"loss": nn.functional.mse_loss(self(inputs), targets)}

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        inputs, targets = batch
        outputs = self(inputs)
        self.log("val_loss", nn.functional.mse_loss(outputs, targets), prog_bar=True)
        self.log_dict({"val/mae": (outputs - targets).abs().mean()})

    def configure_optimizers(self) -> tuple[list[torch.optim.Optimizer], list[object]]:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), "interval": "epoch"}]
