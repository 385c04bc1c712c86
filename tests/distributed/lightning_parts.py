"""Modules in the shape of Lightning's, for tests."""

from argparse import Namespace
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from own_parts import Lit
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset
from torchmetrics import MeanAbsoluteError, MeanSquaredError, MetricCollection, SumMetric

from ddp_recipes import RequestError

Batch = tuple[Tensor, Tensor]


class Valid(Lit):
    """Logs under the name that Lightning's own examples use."""

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("valid_loss", nn.functional.mse_loss(self(batch[0]), batch[1]))


class Sized(Lit):
    """Says itself how many samples a batch is of: fewer than its first tensor has rows."""

    def validation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.log("val_loss", loss, batch_size=1 + batch_idx)
        return loss


class Named(Lit):
    """Has batches that begin with texts, as where samples have names."""

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Any:
        return {"names": [f"sample {number}" for number in range(len(batch[0]))], "pair": batch}

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        return super().training_step(batch["pair"], batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch["pair"], batch_idx)


class Silent(Lit):
    """Neither returns nor logs a loss."""

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_score", torch.ones(()))


class Counting(Lit):
    """Counts its validations in a metric that it never resets."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.count = SumMetric()

    def on_validation_epoch_end(self) -> None:
        self.count.update(1)
        self.log("validations", self.count.compute())


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


class ReadMetric(Metric):
    """Logs such objects as an epoch or a validation ends, and reads in the same hook what they come to."""

    def on_validation_epoch_end(self) -> None:
        self.log("val/late", self.val_mae)
        self.log("val/read", self.trainer.callback_metrics["val/late"])

    def on_train_epoch_end(self) -> None:
        self.log("late", self.train_mae)
        self.log("read", self.trainer.callback_metrics["late"])
        self.train_mae.reset()


class Counted(Lit):
    """Counts the samples that it is trained on in a metric of torchmetrics."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.count = SumMetric()

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        self.count(float(len(batch[0])))
        self.log("samples", self.count, on_step=False, on_epoch=True)
        self.log("batch", float(batch_idx))
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.log("ranks", 1.0, reduce_fx="sum")


class Taught(Lit):
    """Has a teacher, a moving average of its weights, and counts batches in a buffer."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.teacher = deepcopy(self.net1).requires_grad_(False)
        self.register_buffer("batches", torch.zeros(()))

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        for mine, its in zip(self.net1.parameters(), self.teacher.parameters(), strict=True):
            its.data = 0.9 * its.data + 0.1 * mine.data
        self.batches += 1
        assert batch_idx == int(self.batches - 1) % 5

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log("last", float(batch_idx), reduce_fx="max")


class Slim(Taught):
    """Leaves its teacher out of its own state."""

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return {name: each for name, each in super().state_dict().items() if not name.startswith("teacher")}


class Collected(Lit):
    """Has its metrics in a collection, whose values it logs itself."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.scores = MetricCollection([MeanAbsoluteError(), MeanSquaredError()], prefix="val_")

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.scores.update(self(batch[0]), batch[1])
        super().validation_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.scores.compute())
        self.scores.reset()


class OwnTest(Lit):
    """Has a test step that is not its validation step."""

    def test_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return torch.full((), 7.0)


class Sharded(Lit):
    """Defines what is not called."""

    def configure_sharded_model(self) -> None:
        """Would do something."""


class Manual(Lit):
    """Steps by itself."""

    automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizer = self.optimizers()
        assert isinstance(optimizer, torch.optim.Optimizer)  # as Lightning's own example asks
        optimizer.zero_grad()
        self.manual_backward(nn.functional.mse_loss(self(batch[0]), batch[1]))
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Looked(Manual):
    """Steps a table of which each batch looks up some rows."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.table = nn.Embedding(100, 10, sparse=True)

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs + self.table((inputs[:, 0].abs() * 30).long()))

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        of_rows, of_rest = self.optimizers()
        self.manual_backward(nn.functional.mse_loss(self(batch[0]), batch[1]))
        if batch_idx % 2:
            for optimizer in (of_rows, of_rest):
                optimizer.step()
                optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        rest = [each for each in self.parameters() if each is not self.table.weight]
        return torch.optim.SparseAdam([self.table.weight], lr=0.05), torch.optim.SGD(rest, lr=0.05)


class EverySecond(Lit):
    """Steps its optimizer after every second batch, and counts how often it is asked to."""

    asked = 0

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        self.asked += 1
        if batch_idx % 2:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()

    def on_train_epoch_end(self) -> None:
        self.log("asked", float(self.asked), reduce_fx="max")


class Unmonitored(Lit):
    """Has a scheduler that follows a metric, and does not say which."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)}


class Forms(Lit):
    """Returns a scheduler in one of the forms that Lightning takes; each halves the rate once in three epochs."""

    def __init__(self, *arguments: Any, form: str, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.form = form

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.99)
        by_epoch = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        forms: dict[str, Any] = {
            "monitor beside": {"optimizer": optimizer, "lr_scheduler": plateau, "monitor": "val_loss"},
            "one": ([optimizer], by_epoch),
            "a dict": ([optimizer], {"scheduler": by_epoch, "interval": "epoch"}),
            "without": {"lr_scheduler": by_epoch},
            "empty": {"optimizer": optimizer, "lr_scheduler": {"interval": "epoch"}},
        }
        return forms[self.form]


class ManualPlateau(Manual):
    """Tells its scheduler the metric by itself, so that it need not say which one."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)]

    def on_train_epoch_end(self) -> None:
        self.lr_schedulers().step(float(self.trainer.current_epoch))


class Several(Lit):
    """Wants two optimizers stepped for it."""

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([parameter], lr=0.05) for parameter in list(self.parameters())[:2]]


class Halved(Lit):
    """Has nothing of its own."""


class Direct(Lit):
    """Has a parameter beside its layers, which it calls by themselves."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.scale = nn.Parameter(torch.ones(5))

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        outputs = self.net2(self.relu(self.net1(batch[0].flatten(1)))) * self.scale
        return {"loss": nn.functional.mse_loss(outputs, batch[1])}

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        outputs = self.net2(self.relu(self.net1(batch[0].flatten(1)))) * self.scale
        self.log("val_loss", nn.functional.mse_loss(outputs, batch[1]))


class Built(Direct):
    """Makes its layers in configure_model."""

    def __init__(self, in_features: int, hidden_features: int, out_features: int) -> None:
        super().__init__(1, 1, 1)
        self.sizes = in_features, hidden_features, out_features

    def configure_model(self) -> None:
        first, hidden, last = self.sizes
        self.net1, self.net2 = nn.Linear(first, hidden), nn.Linear(hidden, last)


class Freezing(Lit):
    """Freezes a layer in its second epoch."""

    def on_train_epoch_start(self) -> None:
        self.net1.requires_grad_(self.trainer.current_epoch == 0)


class Clipping(Lit):
    """Clips by itself."""

    def configure_gradient_clipping(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Would look at gradients."""


class OnStep(Lit):
    """Asks for a point for each batch of a validation."""

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self(batch[0]), batch[1]), on_step=True)


class Nowhere(Lit):
    """Logs so that nobody gets it."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        self.log("nothing", 1.0, on_step=False, on_epoch=False)
        return super().training_step(batch, batch_idx)


class Removed(Lit):
    """Has a hook of Lightning 1."""

    def validation_epoch_end(self, outputs: Any) -> None:
        """Would log something."""


class Early(Lit):
    """Asks for the number of steps before there are data."""

    def setup(self, stage: str) -> None:
        self.steps = self.trainer.estimated_stepping_batches

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(4, 10), torch.ones(4, 5)))


class Vector(Lit):
    """Returns a loss for each of two samples."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self(batch[0]), batch[1]).expand(2)


class Memory(Lit):
    """Has an optimizer that computes gradients several times in a step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class Late(Lit):
    """Logs when all is over."""

    def on_validation_end(self) -> None:
        self.log("late", 1.0)


class Shaped(Lit):
    """Logs what is no number."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        self.log("shape", torch.ones(2))
        return super().training_step(batch, batch_idx)


class Texts(Lit):
    """Logs a text."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        self.log("shape", "round")
        return super().training_step(batch, batch_idx)


class First(Lit):
    """Logs what only the first of the batches has that a step accumulates."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        self.latest = batch_idx
        self.log("last", float(batch_idx))
        if batch_idx == 1:
            self.log("once", float(batch_idx))
        return super().training_step(batch, batch_idx)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.log("first", float(self.latest))


class Unchanged(Lit):
    """Is trained by no optimizer."""

    def configure_optimizers(self) -> Any:
        """Would return one."""


class Parted(Lit):
    """Brings two sets to predict, and says that it has none to validate on."""

    val_dataloader = None

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(4, 10), torch.ones(4, 5)))

    def predict_dataloader(self) -> Any:
        return [self.train_dataloader(), self.train_dataloader()]


class Repeated(DistributedSampler[Any]):
    """Deals to ranks in its own way."""


class Loaders(Lit):
    """Brings its data."""

    def train_dataloader(self) -> Any:
        data = TensorDataset(torch.ones(4, 10), torch.ones(4, 5))
        return DataLoader(data, batch_size=2, sampler=Repeated(data, 2, 0))


class Untested(nn.Module):
    """Has nothing to measure."""

    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(10, 5)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.layer(batch[0]).mean()


class Keeper(Lit):
    """Keeps a number of its own in checkpoints, which it counts on in each epoch, and fails when it is told to."""

    def __init__(self, *arguments: Any, fails: bool = False, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.epochs, self.fails = 0, fails

    def on_train_epoch_end(self) -> None:
        self.epochs += 1
        self.log("epochs", float(self.epochs))
        if self.fails:
            raise RuntimeError("told to")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["epochs"] = self.epochs

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.epochs = checkpoint["epochs"]


class MetricAsLoss(Lit):
    """Has a metric of torchmetrics give the loss, as forecasting libraries do."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.criterion = MeanSquaredError()

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        return {"loss": self.criterion(self(batch[0]).flatten(), batch[1].flatten())}


class Unsafe(Lit):
    """Puts into a checkpoint what could only be loaded by running code, and what looks so.

    Args:
        needs: a key that it takes from a checkpoint.
    """

    def __init__(self, *arguments: Any, needs: str = "averaged", **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.needs = needs
        self.averaged = [deepcopy(self.net1)]  # no submodule

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["self"] = object()
        checkpoint["averaged"] = self.averaged[0].state_dict()
        checkpoint["best"] = np.float64(0.5)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.averaged[0].load_state_dict(checkpoint["averaged"])
        _ = checkpoint[self.needs]


class Taken(Lit):
    """Puts into a checkpoint what is there already."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["optimizer"] = 1


class Begun(Lit):
    """Draws a number as a batch begins, and counts those that begin and end; may look at what hooks are given."""

    def __init__(self, in_features: int, hidden_features: int, out_features: int, looks: str = "") -> None:
        super().__init__(in_features, hidden_features, out_features)
        self.looks = looks
        self.register_buffer("batches", torch.zeros(2))

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        self.scale = 0.5 + float(torch.rand(())) + np.random.random_sample()
        self.batches[0] += 1
        self.log("begun", self.batches[0])
        if self.looks == "batch":
            _, _ = batch

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        return {"loss": self.scale * super().training_step(batch, batch_idx)["loss"]}

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        self.batches[1] += 1
        assert batch_idx == int(self.batches[1] - 1) % 5
        if self.looks == "outputs":
            _ = outputs["loss"]


class Exchanges(Lit):
    """Asks the strategy what the other ranks have."""

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        strategy, rank, ranks = self.trainer.strategy, self.trainer.global_rank, self.trainer.world_size
        assert self.trainer.fit_loop.total_batch_idx == 4 * self.trainer.current_epoch + batch_idx
        assert strategy.broadcast({"from": rank}) == {"from": 0}
        assert strategy.broadcast(f"rank {rank}", src=ranks - 1) == f"rank {ranks - 1}"
        assert strategy.all_gather(torch.tensor([rank])).flatten().tolist() == [*range(ranks)]
        assert strategy.reduce_boolean_decision(rank == 0, all=False)
        assert strategy.reduce_boolean_decision(rank == 0) == (ranks == 1)
        for operation, value in {"mean": (ranks + 1) / 2, "sum": sum(range(ranks + 1)), "max": ranks}.items():
            mine = torch.tensor([1.0 + rank])
            assert strategy.reduce(mine, reduce_op=operation) is mine
            assert mine.item() == value
        assert strategy.reduce(torch.tensor(1 + rank), reduce_op=torch.distributed.ReduceOp.SUM) == sum(
            range(ranks + 1)
        )
        strategy.barrier("here")
        assert (strategy.world_size, strategy.is_global_zero, len(self.trainer.device_ids)) == (ranks, rank == 0, ranks)
        assert torch.equal(strategy.batch_to_device(batch)[0], batch[0].to(strategy.root_device))

    def on_train_end(self) -> None:
        with pytest.raises(
            AttributeError, match=r"trainer.strategy.setup_optimizers is not there .* all_gather, barrier"
        ):
            self.trainer.strategy.setup_optimizers(self.trainer)
        with pytest.raises(
            AttributeError, match=r"trainer.fit_loop.epoch_progress is not there .*: epoch_loop, max_ep"
        ):
            _ = self.trainer.fit_loop.epoch_progress
        with pytest.raises(
            RequestError, match=r"Exchanges .* sets trainer.fit_loop.max_epochs, .* in the config: train"
        ):
            self.trainer.fit_loop.max_epochs = 3
        with pytest.raises(RequestError, match=r"sets trainer.limit_val_batches=0, .* Set it in the config"):
            self.trainer.limit_val_batches = 0
        with pytest.raises(RequestError, match=r"reduce_op=median. Allowed: mean, sum, product, max, min"):
            self.trainer.strategy.reduce(torch.ones(()), reduce_op="median")

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        if self.trainer.world_size > 1 and not self.trainer.sanity_checking:
            with pytest.raises(RequestError, match=r"A validation step calls trainer.strategy.reduce, and with"):
                self.trainer.strategy.reduce(batch[0].mean())
        super().validation_step(batch, batch_idx)


class TellsStart(Lit):
    """Writes down what its trainer says that the run starts from."""

    def on_fit_start(self) -> None:
        Path(self.trainer.default_root_dir, f"start_{self.trainer.global_rank}").write_text(str(self.trainer.ckpt_path))
        with pytest.raises(RequestError, match=r"sets trainer.ckpt_path=x, .* Set it in the config: ckpt_path\."):
            self.trainer.ckpt_path = "x"


class Saves(Lit):
    """Saves checkpoints of its own: in a validation, after it, and at the end."""

    def __init__(self, in_features: int, hidden_features: int, out_features: int, folder: str) -> None:
        super().__init__(in_features, hidden_features, out_features)
        self.folder = Path(folder)

    def save(self, name: str) -> None:
        if not self.trainer.sanity_checking:
            self.trainer.save_checkpoint(self.folder / f"{name}.ckpt")

    def on_validation_epoch_end(self) -> None:
        self.save("validation")

    def on_train_epoch_end(self) -> None:
        self.save("epoch")

    def on_train_end(self) -> None:
        self.save("end")


class Unmeasured(Lit):
    """Has a threshold that is NaN until somebody measures it."""

    def __init__(self, in_features: int, hidden_features: int, out_features: int) -> None:
        super().__init__(in_features, hidden_features, out_features)
        self.register_buffer("threshold", torch.tensor(torch.nan))


class Ends(Lit):
    """Ends the run on rank 0 alone, in a hook."""

    def __init__(self, in_features: int, hidden_features: int, out_features: int, hook: str) -> None:
        super().__init__(in_features, hidden_features, out_features)
        setattr(self, hook, self.end)

    def end(self, *_: Any) -> None:
        self.trainer.should_stop = self.trainer.is_global_zero and self.trainer.global_step >= 2


class Counter:
    """A callback in the shape of Lightning's, with a state."""

    def __init__(self, file: str) -> None:
        self.file, self.steps = file, 0

    def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """Nothing happens yet."""

    def on_train_batch_end(
        self, trainer: Any, pl_module: nn.Module, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]

    def on_fit_end(self, trainer: Any, pl_module: nn.Module) -> None:
        self.write(f"{self.steps} steps of {trainer.global_step}")

    def on_exception(self, trainer: Any, pl_module: nn.Module, exception: BaseException) -> None:
        self.write(f"failed: {exception!r}")

    def write(self, text: str) -> None:
        with open(self.file, "w") as file:
            file.write(text)


class Gathers(Lit):
    """Calls a collective for each batch of a validation."""

    def __init__(self, *arguments: Any, raw: bool = False, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.raw = raw

    def validation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        if self.raw:
            torch.distributed.all_reduce(loss.clone())
        else:
            assert self.all_gather(loss).shape == (2,)
        return loss


class Contrasts(Lit):
    """Compares what it computes of a sample with what all ranks have, and sends gradients there."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        outputs = self(batch[0])
        of_all, fixed = self.all_gather({"given": outputs, "mean": outputs.mean(0)}, sync_grads=True), outputs[:0]
        assert not self.all_gather(fixed).requires_grad or self.trainer.world_size == 1
        every = of_all["given"].flatten(0, -2)
        return nn.functional.mse_loss(outputs, batch[1]) + every.square().mean()


class Moving(Manual):
    """Has a mean of its inputs that training uses, and that each rank moves by its own samples."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.register_buffer("mean", torch.zeros(10))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(inputs.mean(0), 0.5)
        return super().forward(inputs - self.mean)


class Cooling(Lit):
    """Halves a temperature and the learning rate as an epoch begins."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.register_buffer("temperature", torch.ones(()))

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) * self.temperature

    def on_train_epoch_start(self) -> None:
        self.temperature.mul_(0.5)
        self.trainer.optimizers[0].param_groups[0]["lr"] *= 0.5
        self.log("temperature", self.temperature)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class ManualWays(Manual):
    """Looks at its gradients before it steps, in one of several ways."""

    def __init__(self, *arguments: Any, way: str, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.way = way

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizer, parameters = self.optimizers(), [*self.parameters()]
        if self.way != "in parts" or batch_idx % 2 == 0:
            optimizer.zero_grad()
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        if self.way == "by itself":
            loss.backward()
        else:
            self.manual_backward(loss)
        norm = torch.stack([each.grad.norm() for each in parameters]).norm()
        self.log("norm", norm, on_epoch=True)
        if self.way == "clip_gradients":
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        elif self.way == "clip_grad_norm_":
            nn.utils.clip_grad_norm_(parameters, 0.1)
        elif self.way == "sharpness":
            moves = [each.grad / norm for each in parameters]
            torch._foreach_add_([each.data for each in parameters], moves, alpha=0.05)
            optimizer.zero_grad()
            self.manual_backward(nn.functional.mse_loss(self(batch[0]), batch[1]))
            torch._foreach_sub_([each.data for each in parameters], moves, alpha=0.05)
        if self.way != "in parts" or batch_idx % 2:
            optimizer.step()


class ClosureTwice(Lit):
    """Calls its closure twice, with the same weights."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        optimizer_closure()
        optimizer.step()


class NoClosure(Lit):
    """Computes nothing."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step()


class Frozen(Lit):
    """Has a batch norm that does not learn, put in eval mode in a hook, and one that does."""

    def __init__(self, *arguments: Any, hook: str, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.frozen, self.norm = nn.BatchNorm1d(10), nn.BatchNorm1d(10)
        self.hook = hook
        self.freeze_in("__init__")

    def freeze_in(self, hook: str) -> None:
        if hook == self.hook:
            self.frozen.eval()

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(self.frozen(inputs) + self.norm(inputs))

    def configure_optimizers(self) -> Any:
        self.freeze_in("configure_optimizers")
        return super().configure_optimizers()

    def on_fit_start(self) -> None:
        self.freeze_in("on_fit_start")

    def on_train_start(self) -> None:
        self.freeze_in("on_train_start")

    def on_train_epoch_start(self) -> None:
        self.freeze_in("on_train_epoch_start")


class InTime(Lit):
    """Finds what it has logged at once."""

    def seen(self, name: str) -> float:
        return float(self.trainer.callback_metrics[name])

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        self.log("at", float(self.trainer.global_step), on_epoch=True)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        assert self.seen("at") == self.seen("at_step") == self.trainer.global_step - 1

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_at", float(self.trainer.global_step))

    def on_validation_epoch_end(self) -> None:
        assert self.seen("val_at") == self.trainer.global_step
        self.log("val_twice", 2.0 * self.trainer.global_step)
        assert self.seen("val_twice") == 2 * self.trainer.global_step

    def on_validation_end(self) -> None:
        assert self.seen("val_twice") == 2 * self.trainer.global_step

    def on_train_epoch_end(self) -> None:
        first, last = self.trainer.global_step - self.trainer.num_training_batches, self.trainer.global_step - 1
        assert self.seen("at") == self.seen("at_epoch") == (first + last) / 2


class LoggedTwice(Lit):
    """Logs a name twice in a step, and changes a value after it was logged."""

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("twice", 1.0)
        self.log("twice", 3.0)
        value = torch.ones(())
        self.log("changed", value)
        value.add_(5)


class OneElement(Lit):
    """Has losses of shape [1]."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self(batch[0]), batch[1]).reshape(1)

    def validation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self(batch[0]), batch[1])[None]


class OnRank0(Lit):
    """Logs on one rank alone."""

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        if self.trainer.is_global_zero:
            self.log("val_here", 3.0)

    def on_train_epoch_end(self) -> None:
        if self.trainer.is_global_zero:
            self.log("here", 2.0, rank_zero_only=True)
        else:
            self.log("there", 5.0)


class Brings(Lit):
    """Brings a callback of a class that the config has as well."""

    def __init__(self, *arguments: Any, file: str, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.file = file

    def configure_callbacks(self) -> list[Any]:
        return [Counter(self.file)]


class Rates(Lit):
    """Finds its optimizer by Lightning's wrapper, and no scheduler, for it has none."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        optimizer = self.optimizers()
        assert optimizer.optimizer is self.trainer.optimizers[0] is self.optimizers(use_pl_optimizer=False)
        assert self.lr_schedulers() is None
        assert not self.trainer.lr_scheduler_configs
        optimizer.param_groups[0]["lr"] *= 0.5


class TensorRate(Lit):
    """Has its learning rate in a tensor, to which torch's schedulers write."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=torch.tensor(0.05))
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), "interval": "step"}]


class ByStep(Lit):
    """Has the learning rate follow the steps that the trainer has counted, as schedulers of timm are told."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.5**self.trainer.global_step)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Counts(Lit):
    """Looks at how many batches a step takes, and logs a point under the name of Lightning's axis."""

    def on_train_batch_end(self, outputs: dict[str, Tensor], batch: Batch, batch_idx: int) -> None:
        taken = self.trainer.accumulate_grad_batches
        assert taken == 1 + self.trainer.current_epoch
        loss = nn.functional.mse_loss(self.before, batch[1])
        assert float(outputs["loss"]) == pytest.approx(float(loss) / taken)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = super().forward(inputs)
        self.before = outputs.detach()
        return outputs

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        self.log_dict({"step": float(self.trainer.current_epoch), "twice": 2.0})
        return super().training_step(batch, batch_idx)

    def setup(self, stage: str) -> None:
        self.trainer.callbacks.append(SimpleNamespace(on_train_start=lambda _, module: setattr(module, "told", True)))

    def on_train_end(self) -> None:
        assert self.told
        self.trainer.logger.log_hyperparams(Namespace(width=3))
        with pytest.raises(AttributeError, match=r"logger.log_image is not there .* log_hyperparams, .*; experiment"):
            self.trainer.logger.log_image("generated", [])
        with pytest.raises(AttributeError, match=r"trainer.nothing is not there"):
            _ = self.trainer.nothing
        self.trainer.logger.experiment.config.update({"a": 1})


def with_loaders() -> Any:
    """Return a data module as ``LightningDataModule.from_datasets`` makes it: its loaders are attributes."""
    data = TensorDataset(torch.ones(4, 10), torch.ones(4, 5))
    return SimpleNamespace(train_dataloader=lambda: DataLoader(data, batch_size=2))


class Predicts(Lit):
    """Predicts several things."""

    def predict_step(self, batch: Batch, batch_idx: int) -> Any:
        outputs = self(batch[0])
        return {"outputs": outputs, "best": outputs.argmax(1), "pair": (outputs[:, 0], ["a" for _ in outputs])}


class PredictsTheMean(Lit):
    """Predicts one number a batch, on its last rank."""

    def predict_step(self, batch: Batch, batch_idx: int) -> Any:
        outputs = self(batch[0])
        return {"mean": outputs.mean() if self.trainer.global_rank == self.trainer.world_size - 1 else outputs}


class Writes:
    """A callback in the shape of Lightning's ``BasePredictionWriter``."""

    def __init__(self, folder: str) -> None:
        self.folder, self.interval = Path(folder), SimpleNamespace(on_batch=True, on_epoch=True)

    def setup(self, trainer: Any, pl_module: nn.Module, stage: str) -> None:
        """Nothing is to be done."""

    def on_predict_batch_end(
        self, trainer: Any, pl_module: nn.Module, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        numbers = trainer.predict_loop.current_batch_indices
        torch.save((numbers, batch[1]), self.folder / f"{trainer.global_rank}_{batch_idx}.pt")

    def on_predict_epoch_end(self, trainer: Any, pl_module: nn.Module) -> None:
        loop = trainer.predict_loop
        (indices,) = loop.epoch_batch_indices
        assert [len(each) for each in indices] == [len(each["outputs"]) for each in loop.predictions]


class Looks(Lit):
    """Uses what Lightning's trainer has of loaders and checkpoints."""

    def __init__(self, *arguments: Any, file: str, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.file = file

    def on_train_start(self) -> None:
        loader = self.trainer.val_dataloaders
        assert len(loader) == self.trainer.num_val_batches[0]
        assert len(next(iter(loader))[0]) <= loader.batch_size
        assert len(loader.dataset) == 21

    def on_train_epoch_end(self) -> None:
        samples = sum(len(inputs) for inputs, _ in self.trainer.train_dataloader)
        assert samples * self.trainer.world_size == 64

    def on_train_end(self) -> None:
        self.trainer.save_checkpoint(self.file)
        self.trainer.save_checkpoint(f"{self.file}.weights", weights_only=True)
        kept = self.trainer.checkpoint_callback
        assert (Path(kept.dirpath) / "best.pt").samefile(kept.best_model_path)
        assert kept.best_model_score == pytest.approx(self.trainer.callback_metrics["val/loss"])


class Own(Lit):
    """Brings loaders: of 9 samples to validate on, the last is dropped; and names its scheduler."""

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(12, 10), torch.ones(12, 5)), batch_size=4)

    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.zeros(9, 10), torch.ones(9, 5)), batch_size=4, drop_last=True)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        assert not batch[0].any()
        self.log("val_batches", float(self.trainer.num_val_batches[0]))

    def on_train_start(self) -> None:
        assert [each.name for each in self.trainer.lr_scheduler_configs] == ["slowly"]

    def configure_optimizers(self) -> Any:
        (optimizer,), _ = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "name": "slowly"}}


class Endless(IterableDataset[Batch]):
    """Gives samples without an end."""

    def __iter__(self) -> Any:
        while True:
            yield torch.ones(10), torch.ones(5)


class Streamed(Own):
    """Is trained on a stream, by a schedule that ends with the run."""

    def train_dataloader(self) -> Any:
        return DataLoader(Endless(), batch_size=4)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters())
        steps = int(self.trainer.estimated_stepping_batches)
        assert (steps, self.trainer.num_training_batches, len(self.trainer.train_dataloader)) == (6, 3, 3)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "name": "slowly"}]


class Held(TensorDataset):
    """Is too large to be copied."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise MemoryError


class Template(Own):
    """Keeps its data, and asks its trainer, as projects that began with a template do."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "trainer": None}  # as LightningModule has it

    def train_dataloader(self) -> Any:
        self.held = Held(torch.ones(12, 10), torch.ones(12, 5))
        return DataLoader(self.held, batch_size=4)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.trainer.model.parameters())
        steps = int(self.trainer.estimated_stepping_batches)
        assert self.trainer.fit_loop.epoch_loop.val_loop._data_source.is_defined()
        return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, steps)]


class Shifts(Own):
    """Changes batches by the number of their set: that of training is 0, also after a validation of two."""

    def val_dataloader(self) -> Any:
        return [super(Shifts, self).val_dataloader() for _ in range(2)]

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        return [each + dataloader_idx for each in batch] if self.trainer.training else batch

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        assert bool((batch[0] == 1).all())
        return super().training_step(batch, batch_idx)


class CombinedLoader:
    """A loader by the name of Lightning's."""

    def __init__(self, *iterables: Any) -> None:
        self.iterables = iterables


class Combined(Own):
    """Combines loaders of validation."""

    def val_dataloader(self) -> Any:
        return CombinedLoader(super().val_dataloader())
