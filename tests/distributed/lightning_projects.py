"""Projects written for Lightning, in the shapes that public ones have: nothing in here knows of ddp_recipes."""

from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import BaseFinetuning, Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MaxMetric, MeanMetric
from torchmetrics.classification import MulticlassAccuracy

Batch = tuple[Tensor, Tensor]


class Points(Dataset[Batch]):
    """Eight numbers and one of three classes."""

    def __init__(self, count: int, seed: int) -> None:
        inputs = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
        self.inputs, self.targets = inputs, (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0).long()

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Batch:
        return self.inputs[index], self.targets[index]


class PointsData(L.LightningDataModule):
    """Splits that are made in setup, as most data modules do."""

    def __init__(self, batch_size: int = 16, folder: str | None = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.batch_size = batch_size

    def prepare_data(self) -> None:
        if self.hparams.folder is not None:
            (Path(self.hparams.folder) / "prepared").open("a").write("once\n")

    def teardown(self, stage: str) -> None:
        if self.hparams.folder is not None and self.trainer.is_global_zero:
            (Path(self.hparams.folder) / "prepared").open("a").write("done\n")

    def setup(self, stage: str | None = None) -> None:
        assert self.trainer is None or self.batch_size % self.trainer.world_size == 0
        self.train, self.val = Points(64, 0), Points(48, 1)

    def train_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(self.train, batch_size=self.batch_size)

    def val_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(self.val, batch_size=self.batch_size)

    def test_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(self.val, batch_size=self.batch_size)

    def predict_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(self.val, batch_size=self.batch_size)


def seeded(seed: int, *layers: Any) -> nn.Sequential:
    """Make layers with weights that do not depend on what was drawn before."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(*(layer() for layer in layers))


class Classifier(L.LightningModule):
    """Metrics of torchmetrics as attributes, a scheduler that follows a metric, the best value so far."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = seeded(1, lambda: nn.Linear(8, 16), nn.ReLU, lambda: nn.Linear(16, 3))
        self.train_accuracy, self.val_accuracy, self.test_accuracy = (
            MulticlassAccuracy(3, average="micro") for _ in range(3)
        )
        self.train_loss, self.val_loss = MeanMetric(), MeanMetric()
        self.best = MaxMetric()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs)

    def on_train_start(self) -> None:
        self.val_loss.reset()
        self.val_accuracy.reset()
        self.best.reset()

    def step(self, batch: Batch) -> tuple[Tensor, Tensor]:
        outputs = self(batch[0])
        return nn.functional.cross_entropy(outputs, batch[1]), outputs

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss, outputs = self.step(batch)
        self.train_loss(loss)
        self.train_accuracy(outputs, batch[1])
        self.log("train/loss", self.train_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("train/acc", self.train_accuracy, on_step=False, on_epoch=True)
        self.log("train/plain", loss, on_step=True, on_epoch=True)
        self.log_dict({"at/step": float(self.global_step), "at/batch": float(batch_idx)}, on_step=True, on_epoch=False)
        self.log("at/epoch", float(self.current_epoch), on_step=False, on_epoch=True, reduce_fx="max")
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        loss, outputs = self.step(batch)
        self.val_loss(loss)
        self.val_accuracy(outputs, batch[1])
        self.log("val/loss", self.val_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("val/acc", self.val_accuracy, on_step=False, on_epoch=True, prog_bar=True)

    def on_validation_epoch_end(self) -> None:
        self.best(self.val_accuracy.compute())
        self.log("val/acc_best", self.best.compute(), sync_dist=True)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        loss, outputs = self.step(batch)
        self.test_accuracy(outputs, batch[1])
        self.log("test_nll", loss)
        self.log("test/acc", self.test_accuracy, on_step=False, on_epoch=True)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val/loss"}}


class Autoencoder(L.LightningModule):
    """Logs under Lightning's own examples' names; accumulates, clips by itself, schedules by steps."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = seeded(2, lambda: nn.Linear(8, 4), nn.ReLU, lambda: nn.Linear(4, 2))
        self.decoder = seeded(3, lambda: nn.Linear(2, 4), nn.ReLU, lambda: nn.Linear(4, 8))

    def step(self, batch: Batch) -> Tensor:
        return nn.functional.mse_loss(self.decoder(self.encoder(batch[0])), batch[0])

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        loss = self.step(batch)
        self.log("train_loss", loss)
        return {"loss": loss, "twice": 2 * loss.detach()}

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        assert outputs["twice"] == 4 * outputs["loss"]  # of two batches that are accumulated

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("valid_loss", self.step(batch))

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        norms = [parameter.grad.norm() for parameter in self.parameters() if parameter.grad is not None]
        self.log("norm", torch.stack(norms).norm(), on_step=False, on_epoch=True)

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.3, gradient_clip_algorithm="norm")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
        schedule = {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}
        return [optimizer], [{**schedule, "frequency": 2}]


class Adversaries(L.LightningModule):
    """Two optimizers that it steps itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = seeded(4, lambda: nn.Linear(4, 16), nn.ReLU, lambda: nn.Linear(16, 8))
        self.discriminator = seeded(5, lambda: nn.Linear(8, 16), nn.ReLU, lambda: nn.Linear(16, 1))

    def judged(self, points: Tensor, real: bool) -> Tensor:
        outputs = self.discriminator(points)
        return nn.functional.binary_cross_entropy_with_logits(outputs, torch.full_like(outputs, float(real)))

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        of_generator, of_discriminator = self.optimizers()
        noise = batch[0][:, :4] * 0.5
        self.toggle_optimizer(of_generator)
        loss = self.judged(self.generator(noise), True)
        self.log("generator", loss, prog_bar=True)
        of_generator.zero_grad()
        self.manual_backward(loss)
        of_generator.step()
        self.untoggle_optimizer(of_generator)
        self.toggle_optimizer(of_discriminator)
        loss = (self.judged(batch[0], True) + self.judged(self.generator(noise).detach(), False)) / 2
        self.log("discriminator", loss, on_epoch=True)
        of_discriminator.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(of_discriminator, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        of_discriminator.step()
        self.untoggle_optimizer(of_discriminator)
        if self.trainer.is_last_batch:
            for scheduler in self.lr_schedulers():
                scheduler.step()

    def on_train_epoch_end(self) -> None:
        self.log("size", sum(parameter.norm() for parameter in self.generator.parameters()))
        self.log("steps", float(self.trainer.global_step))

    def configure_optimizers(self) -> Any:
        both = [torch.optim.Adam(each.parameters(), 0.01) for each in (self.generator, self.discriminator)]
        return both, [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in both]


class FineTuned(L.LightningModule):
    """A head on a backbone that a callback unfreezes."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = seeded(6, lambda: nn.Linear(8, 16), nn.ReLU)
        self.head = seeded(7, lambda: nn.Linear(16, 3))

    def step(self, batch: Batch, stage: str) -> Tensor:
        loss = nn.functional.cross_entropy(self.head(self.backbone(batch[0])), batch[1])
        self.log(f"{stage}_loss", loss, on_step=False, on_epoch=True)
        return loss

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.step(batch, "train")

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.step(batch, "val")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam((each for each in self.parameters() if each.requires_grad), lr=0.02)


class Unfreeze(BaseFinetuning):
    """Trains the backbone from an epoch on."""

    def __init__(self, epoch: int = 1) -> None:
        super().__init__()
        self.epoch = epoch

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == self.epoch:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer, lr=0.005)


class Language(L.LightningModule):
    """Predicts the class of a point as a text of one token, with its own warm-up in ``optimizer_step``."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = seeded(8, lambda: nn.Embedding(32, 16))
        self.block = seeded(9, lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True))
        self.head = seeded(10, lambda: nn.Linear(16, 3))

    def step(self, batch: Batch) -> Tensor:
        tokens = (batch[0] * 4).long().clamp(-16, 15) + 16
        return nn.functional.cross_entropy(self.head(self.block(self.embedding(tokens)).mean(dim=1)), batch[1])

    def training_step(self, batch: Batch) -> Tensor:
        loss = self.step(batch)
        self.log("train_nll", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        loss = self.step(batch)
        self.log("val_loss", loss, batch_size=len(batch[0]))
        return loss

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * min(1.0, (self.trainer.global_step + 1) / 6)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1 / 6)


class Two(FineTuned):
    """Brings its own loaders, two of them for validation."""

    def train_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(Points(64, 0), batch_size=16)

    def val_dataloader(self) -> list[DataLoader[Batch]]:
        return [DataLoader(Points(48, seed), batch_size=16) for seed in (1, 2)]

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.step(batch, "val")


STAGES = [
    f"on_{stage}_{event}"
    for stage in ("validation", "test", "predict")
    for event in ("start", "end", "epoch_start", "epoch_end", "batch_start", "batch_end", "model_eval", "model_train")
]
EVENTS = [
    *("prepare_data", "setup", "configure_model", "configure_callbacks", "on_fit_start", "on_fit_end", "teardown"),
    *("on_train_start", "on_train_end", "on_train_epoch_start", "on_train_epoch_end", "on_train_batch_start"),
    *("on_train_batch_end", "on_before_zero_grad", "on_before_backward", "on_after_backward", "backward"),
    *("on_before_optimizer_step", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping"),
    *("lr_scheduler_step", "on_validation_model_zero_grad", "on_sanity_check_start", "on_sanity_check_end"),
    *("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer", "training_step"),
    *("validation_step", "test_step", "predict_step", "configure_optimizers"),
    *STAGES,
]


class Seen(Callback):
    """Writes down each of its own hooks."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls


class Recorded(Classifier):
    """Writes down each hook that is called, and has a callback that does so, too; at the end, all of it to a file."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.folder = folder

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self(batch[0])


def noting(name: str, of: type) -> Any:
    """Return a hook that writes itself down and goes on as before."""
    parent = getattr(of, name)

    def hook(self: Any, *arguments: Any, **options: Any) -> Any:
        self.calls.append(f"callback.{name}" if of is Callback else name)
        if name == "configure_callbacks":
            return [Seen(self.calls)]
        if name == "teardown" and of is not Callback:
            stage = [*arguments, *options.values()][0]  # of Lightning an enumeration
            (Path(self.folder) / f"{getattr(stage, 'value', stage)}.txt").write_text("\n".join(self.calls))
        return parent(self, *arguments, **options)

    return hook


for event in EVENTS:
    if hasattr(Recorded, event):
        setattr(Recorded, event, noting(event, Recorded))
    if hasattr(Callback, event):
        setattr(Seen, event, noting(event, Callback))
