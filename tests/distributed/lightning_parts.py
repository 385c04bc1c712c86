"""Modules in the shape of Lightning's, for tests."""

from typing import Any

import torch
from own_parts import Lit
from torch import Tensor, nn
from torchmetrics import MeanAbsoluteError

Batch = tuple[Tensor, Tensor]


class Valid(Lit):
    """Logs under the name that Lightning's own examples use."""

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("valid_loss", nn.functional.mse_loss(self(batch[0]), batch[1]))


class Silent(Lit):
    """Neither returns nor logs a loss."""

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_score", torch.ones(()))


class Metric(Lit):
    """Logs a metric of torchmetrics as an object, and has another one that it uses in training."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.train_mae, self.val_mae = MeanAbsoluteError(), MeanAbsoluteError()

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        self.train_mae.update(self(batch[0]).detach(), batch[1])
        self.log("train/mae", self.train_mae)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        outputs = self(batch[0])
        self.val_mae.update(outputs, batch[1])
        self.log("val/metric", self.val_mae, on_step=False, on_epoch=True)
        super().validation_step(batch, batch_idx)


class OwnTest(Lit):
    """Has a test step that is not its validation step."""

    def test_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return torch.full((), 7.0)


class Hooks(Lit):
    """Defines what is not called."""

    def on_train_epoch_end(self) -> None:
        """Would do something."""

    def train_dataloader(self) -> object:
        return []


class Manual(Lit):
    """Steps by itself."""

    automatic_optimization = False


class Plateau(Lit):
    """Has a scheduler that follows a metric."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)}
