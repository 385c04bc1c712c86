"""Projects written for Lightning give the numbers of ``lightning.Trainer``, at one rank and at two."""

import json
import subprocess
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ddp_recipes.lightning.hooks import CALLED, REFUSED
from helpers.marks import slow_but
from helpers.patience import patience
from helpers.recipes import QUICK
from helpers.warm import warm_python

HERE = Path(__file__).parent
CASES = ["Classifier", "Autoencoder", "Adversaries", "FineTuned", "Language", "Two"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("lightning") is None, reason="needs the package lightning"),
]

Found = dict[str, dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("projects")


@pytest.fixture(scope="module")
def python_with_lightning() -> Iterator[str]:
    with warm_python("lightning") as python:
        yield python


@pytest.fixture(scope="module")
def trained(folder: Path, python_with_lightning: str) -> Callable[[str], Found]:
    """Return metrics and weights of each project: by Lightning, or by us at so many ranks. Each is trained once."""

    def once(who: str) -> Found:
        file = folder / f"{who}.json"
        if not file.exists():
            command = [python_with_lightning, str(HERE / "lightning_reference.py"), who, str(folder)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=patience(300), cwd=folder)
            assert done.returncode == 0, done.stderr[-3000:]
        found: Found = json.loads(file.read_text())
        return found

    return once


@pytest.mark.parametrize("name", slow_but([], CASES, ["Classifier", "Adversaries", "FineTuned", "Two"]))
def test_a_project_gives_the_numbers_of_lightning(name: str, trained: Callable[[str], Found]) -> None:
    theirs, ours = trained("lightning")[name], trained("1")[name]
    own = {key: value for key, value in ours["metrics"].items() if key in theirs["metrics"]}
    assert own == pytest.approx(theirs["metrics"], abs=1e-6)
    assert ours["weights"].keys() == theirs["weights"].keys()
    for key, value in theirs["weights"].items():
        assert ours["weights"][key] == pytest.approx(value, abs=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_give_the_numbers_of_one(name: str, trained: Callable[[str], Found]) -> None:
    one, two = trained("1")[name], trained("2")[name]
    ignored = {"train/samples_per_second"}
    assert {k: v for k, v in two["metrics"].items() if k not in ignored} == pytest.approx(
        {k: v for k, v in one["metrics"].items() if k not in ignored}, abs=1e-5
    )
    for key, value in one["weights"].items():
        assert two["weights"][key] == pytest.approx(value, abs=1e-4)


@pytest.mark.parametrize("name", ["Classifier", "Autoencoder"])
def test_a_resume_within_an_epoch_gives_the_numbers_of_all_of_it(name: str, trained: Callable[[str], Found]) -> None:
    whole, resumed = trained("1")[name]["metrics"], trained("resumed")[name]["metrics"]
    left_out = ("samples_per_second", "best", "test")  # the module resets its best when training starts
    for key, value in whole.items():
        if not any(part in key for part in left_out):
            assert resumed[key] == pytest.approx(value, abs=1e-6), key


@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
def test_hooks_are_called_in_the_order_of_lightning(stage: str, trained: Callable[[str], Found], folder: Path) -> None:
    trained("lightning")
    trained("1")
    ours, theirs = ((folder / f"calls_{who}" / f"{stage}.txt").read_text() for who in ("ours", "lightning"))
    assert ours == theirs


def test_data_are_prepared_and_cleared_up_once_a_run(trained: Callable[[str], Found], folder: Path) -> None:
    trained("2")
    runs = [path for path in folder.glob("*_2") if not path.name.startswith("Two")]
    assert (folder / "prepared").read_text().split() == ["once", "done"] * len(runs)


LIST = """
import json
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.core import hooks
own = [Callback, LightningDataModule, LightningModule, hooks.ModelHooks, hooks.DataHooks, hooks.CheckpointHooks]
print(json.dumps([name for each in own for name in vars(each) if not name.startswith("_")]))
"""


def test_every_hook_of_the_installed_lightning_is_called_or_refused(python_with_lightning: str) -> None:
    """So that one that a new release adds is not ignored."""
    listed = subprocess.run(
        [python_with_lightning, "-c", LIST], check=True, capture_output=True, text=True, timeout=patience(120)
    )
    for_users_to_call = {
        *("CHECKPOINT_HYPER_PARAMS_KEY", "CHECKPOINT_HYPER_PARAMS_NAME", "CHECKPOINT_HYPER_PARAMS_TYPE"),
        *("optimizers", "lr_schedulers", "trainer", "fabric", "example_input_array", "current_epoch", "global_step"),
        *("global_rank", "local_rank", "on_gpu", "strict_loading", "logger", "loggers", "device_mesh", "print", "log"),
        *("log_dict", "manual_backward", "all_gather", "automatic_optimization", "toggle_optimizer"),
        *("untoggle_optimizer", "toggled_optimizer", "freeze", "name", "from_datasets", "state_key"),
        "CHECKPOINT_HYPER_PARAMS_SPECIAL_KEY",
        *("clip_gradients", "unfreeze", "to_onnx", "to_torchscript", "to_tensorrt", "load_from_checkpoint"),
    }
    of_callbacks = {"on_sanity_check_start", "on_sanity_check_end"}
    known = {*CALLED, *REFUSED, *of_callbacks, "state_dict", "load_state_dict"}
    assert {*json.loads(listed.stdout)} - for_users_to_call <= known


# A callback as in the documentation of Lightning's BasePredictionWriter.
WRITER = """
import os

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BasePredictionWriter


class Module(LightningModule):
    def __init__(self, in_features, hidden_features, out_features):
        super().__init__()
        self.net = torch.nn.Linear(in_features, out_features)

    def training_step(self, batch):
        return self.net(batch[0]).square().mean()

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters())


class CustomWriter(BasePredictionWriter):
    def __init__(self, output_dir, write_interval):
        super().__init__(write_interval)
        self.output_dir = output_dir

    def save(self, name, predictions, batch_indices):
        torch.save((predictions, batch_indices), os.path.join(self.output_dir, f"{name}.pt"))

    def write_on_batch_end(self, trainer, pl_module, prediction, batch_indices, batch, batch_idx, dataloader_idx):
        self.save(f"batch_{trainer.global_rank}_{batch_idx}", [prediction], [[batch_indices]])

    def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
        self.save(f"epoch_{trainer.global_rank}", predictions, batch_indices)
"""


@pytest.mark.spawn
@pytest.mark.parametrize(
    ("interval", "files"), {"batch": ["batch"], "epoch": ["epoch"], "batch_and_epoch": ["batch", "epoch"]}.items()
)
def test_a_prediction_writer_of_lightning_writes_each_sample_once(
    interval: str, files: list[str], python_with_lightning: str, tmp_path: Path
) -> None:
    (tmp_path / "writer.py").write_text(WRITER)
    writer = f"_target_: writer.CustomWriter, output_dir: {tmp_path}, write_interval: {interval}"
    own = ["task=lightning", "model._target_=writer.Module", f"+callbacks.writer={{{writer}}}", "hydra.run.dir=run"]
    mode = ["mode=predict", "data.predict=${data.val}", "data.val_batch_size=4", "launcher.nproc_per_node=2"]
    command = [python_with_lightning, "-m", "ddp_recipes", *QUICK, *own, *mode]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=patience(120))
    assert done.returncode == 0, done.stderr
    whole = torch.load(tmp_path / "run" / "predictions.pt", weights_only=True)
    for kind in ("batch", "epoch"):
        written = [torch.load(path, weights_only=True) for path in tmp_path.glob(f"{kind}_*.pt")]
        assert bool(written) == (kind in files)
        rows = [pair for each, numbers in written for pair in one_by_one(each, numbers)]
        assert sorted(number for number, _ in rows) == ([*range(21)] if kind in files else [])
        assert all(torch.equal(row, whole[number]) for number, row in rows)


def one_by_one(predictions: list[Tensor], batch_indices: list[list[list[int]]]) -> Iterator[tuple[int, Tensor]]:
    """Yield the number of each sample and what was predicted for it."""
    (of_loader,) = batch_indices
    for rows, numbers in zip(predictions, of_loader, strict=True):
        yield from zip(numbers, rows, strict=True)


# Hyper-parameters as older projects have them, in one argument; and a data module that counts its epochs.
ARGUMENTS = """
import sys
from argparse import Namespace

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch.utils.data import DataLoader, TensorDataset


class Module(LightningModule):
    def __init__(self, args):
        super().__init__()
        self.save_hyperparameters(args)
        self.net = torch.nn.Linear(4, args.width)

    def training_step(self, batch):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters())


class Data(LightningDataModule):
    def __init__(self, sizes, dtype=torch.float32):
        super().__init__()
        self.save_hyperparameters()
        self.loaders = 0

    def train_dataloader(self):
        self.loaders += 1
        return DataLoader(TensorDataset(torch.ones(8, 4)), self.hparams.sizes["train"])

    def state_dict(self):
        return {"loaders": self.loaders}

    def load_state_dict(self, state):
        self.loaders = state["loaders"]


def make():
    return Module(Namespace(width=3))


if __name__ == "__main__":
    module, data = (cls.load_from_checkpoint(sys.argv[1]) for cls in (Module, Data))
    print(module.net.out_features, data.hparams.sizes["train"], data.loaders)
"""


@pytest.mark.spawn
def test_what_modules_and_data_modules_saved_of_their_arguments_makes_them_again(
    python_with_lightning: str, tmp_path: Path
) -> None:
    (tmp_path / "arguments.py").write_text(ARGUMENTS)
    own = ["task=lightning", "~model", "+model._target_=arguments.make", "hydra.run.dir=run", "strategy=single"]
    data = ["data=lightning", "data.datamodule._target_=arguments.Data", "+data.datamodule.sizes.train=2"]
    command = [python_with_lightning, "-m", "ddp_recipes", *own, *data, "trainer.max_epochs=1", "logger=none"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=patience(120))
    assert done.returncode == 0, done.stderr
    assert "The hyper-parameters dtype of Data are no plain data" in (tmp_path / "run" / "train.log").read_text()
    command = [python_with_lightning, "arguments.py", "run/checkpoints/last.pt"]
    loaded = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=patience(120))
    assert loaded.stdout.split()[-3:] == ["3", "2", "1"], loaded.stderr


PICTURES = """
import torch
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from writer import Module


class Pictures(Module):
    def on_train_epoch_end(self):
        table, board = self.trainer.loggers
        assert self.logger is table and isinstance(table, CSVLogger) and not isinstance(table, TensorBoardLogger)
        assert isinstance(board, TensorBoardLogger) and isinstance(board, Logger)
        board.experiment.add_image("drawn", torch.zeros(3, 4, 4), self.current_epoch)
        table.log_metrics({"of_table": 1})
"""


@pytest.mark.spawn
def test_a_module_that_asks_for_the_logger_of_lightning_finds_it(python_with_lightning: str, tmp_path: Path) -> None:
    (tmp_path / "writer.py").write_text(WRITER)
    (tmp_path / "pictures.py").write_text(PICTURES)
    own = ["task=lightning", "model._target_=pictures.Pictures", "logger=[csv,tensorboard]", "hydra.run.dir=run"]
    command = [python_with_lightning, "-m", "ddp_recipes", *QUICK, *own, "launcher.nproc_per_node=2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=patience(120))
    assert done.returncode == 0, done.stderr
    events = next((tmp_path / "run" / "tensorboard").iterdir()).read_bytes()
    assert b"drawn" in events
    assert b"of_table" not in events
    assert "of_table" in (tmp_path / "run" / "csv" / "metrics.csv").read_text()


FOLLOWED = """
from lightning.pytorch.callbacks import EarlyStopping
from writer import Module


class Followed(Module):
    def training_step(self, batch):
        loss = super().training_step(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch):
        self.log("val_loss", super().training_step(batch))

    def configure_callbacks(self):
        return EarlyStopping("train_loss", patience=100)
"""


@pytest.mark.spawn
@pytest.mark.slow
def test_what_a_step_logs_is_found_by_who_follows_it_also_where_it_is_not_due(
    python_with_lightning: str, tmp_path: Path
) -> None:
    (tmp_path / "writer.py").write_text(WRITER)
    (tmp_path / "followed.py").write_text(FOLLOWED)
    own = [
        "task=lightning",
        "model._target_=followed.Followed",
        "trainer.max_epochs=1",
        "trainer.val_check_interval=0.5",
    ]
    own += ["checkpoint=default", "checkpoint.monitor=train_loss", "checkpoint.every_n_steps=1"]
    best = []
    for every in (1, 50):
        often = [f"trainer.log_every_n_steps={every}", f"hydra.run.dir=run_{every}", "launcher.nproc_per_node=2"]
        command = [python_with_lightning, "-m", "ddp_recipes", *QUICK, *own, *often]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=patience(120))
        assert done.returncode == 0, done.stderr
        best.append((tmp_path / f"run_{every}" / "checkpoints" / "best.pt").resolve().name)
    assert best[0] == best[1]


IMAGES = """
import torch
from lightning.pytorch.loggers import WandbLogger
from writer import Module


class Images(Module):
    def on_train_epoch_end(self):
        assert isinstance(self.logger, WandbLogger)
        self.logger.log_image("drawn", [torch.zeros(3, 4, 4)])
        self.logger.log_text("said", columns=["epoch"], data=[[str(self.current_epoch)]])
"""


@pytest.mark.spawn
@pytest.mark.skipif(find_spec("wandb") is None, reason="needs the package wandb")
def test_pictures_go_to_wandb_by_the_methods_of_lightning(python_with_lightning: str, tmp_path: Path) -> None:
    (tmp_path / "writer.py").write_text(WRITER)
    (tmp_path / "images.py").write_text(IMAGES)
    own = ["task=lightning", "model._target_=images.Images", "logger=wandb", "logger.mode=offline", "hydra.run.dir=run"]
    command = [python_with_lightning, "-m", "ddp_recipes", *QUICK, *own, "launcher.nproc_per_node=2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=patience(120))
    assert done.returncode == 0, done.stderr
    assert len([*(tmp_path / "run" / "wandb").glob("offline-run-*/files/media/images/drawn_*.png")]) == 2
