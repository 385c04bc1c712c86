"""Loggers, read back as TensorBoard reads them."""

import base64
import copy
import csv
import logging
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2
from torch import Tensor, nn

from ddp_recipes.build.instantiate import make
from ddp_recipes.loggers import CSVLogger, Logger, Loggers, TensorBoardLogger
from helpers.marks import needs
from helpers.trackers import QUIET, wandb_exit_code, wandb_points, wandb_records, wandb_rows

PNG = base64.b64decode(  # a pixel
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
)
CONF = Path(__file__).parents[2] / "conf" / "logger"


def read(directory: Path) -> EventAccumulator:
    return EventAccumulator(str(directory), size_guidance={"scalars": 0}).Reload()


def points(directory: Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in read(directory).Scalars(tag)]


def hparams_data(directory: Path) -> dict[str, plugin_data_pb2.HParamsPluginData]:
    contents = read(directory).PluginTagToContent("hparams")
    return {tag: plugin_data_pb2.HParamsPluginData.FromString(content) for tag, content in contents.items()}


def rows(directory: Path) -> list[dict[str, str]]:
    """Return the table of a CSVLogger; every row must have every column."""
    with (directory / "metrics.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    assert all(None not in row and None not in row.values() for row in found)
    return found


def column(directory: Path, name: str) -> list[tuple[int, float]]:
    return [(int(row["step"]), float(row[name])) for row in rows(directory) if row[name]]


@pytest.mark.parametrize("option", ["none", "tensorboard", "csv"])
def test_yaml_makes_a_logger(option: str, tmp_path: Path) -> None:
    node = yaml.safe_load((CONF / f"{option}.yaml").read_text())
    logger = make(node, "logger", directory=tmp_path / "folder", purge_step=None)
    logger.scalars({"loss": 1.0}, 1)
    logger.close()
    assert isinstance(logger, Logger)
    assert logger.folder == option.replace("none", "")
    assert (tmp_path / "folder").exists() == (option != "none")


def test_base_takes_everything_and_writes_nothing(tmp_path: Path) -> None:
    logger = Logger(directory=tmp_path, purge_step=3)
    logger.scalars({"loss": 1.0}, 1)
    logger.text("config", "a: 1")
    logger.hparams({"lr": 0.1}, {"val/loss": 1.0})
    logger.graph(nn.Linear(2, 1), torch.ones(3, 2))
    logger.flush()
    logger.close()
    assert list(tmp_path.iterdir()) == []


def test_scalars_and_text(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    logger.scalars({"train/loss": 0.5, "lr": 0.25}, 10)
    logger.scalars({"train/loss": 0.125}, 20)
    logger.text("config", "seed: 42")
    logger.close()
    assert points(tmp_path, "train/loss") == [(10, 0.5), (20, 0.125)]
    assert points(tmp_path, "lr") == [(10, 0.25)]
    (event,) = read(tmp_path).Tensors("config/text_summary")
    assert event.tensor_proto.string_val == [b"seed: 42"]


def test_flush_makes_points_visible_while_the_run_goes_on(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, flush_secs=3600)
    logger.scalars({"loss": 0.5}, 1)
    logger.flush()
    assert points(tmp_path, "loss") == [(1, 0.5)]
    logger.close()


def test_everything_goes_into_one_file(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, graph=True)
    logger.scalars({"val/loss": 0.5}, 10)
    logger.text("config", "seed: 42")
    logger.graph(nn.Linear(2, 1), torch.ones(3, 2))
    logger.hparams({"optimizer.lr": 0.1}, {"val/loss": 0.5})
    logger.close()
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 1


def test_hparams_hold_parameters_and_final_metrics(tmp_path: Path) -> None:
    params: dict[str, bool | int | float | str] = {
        "optimizer.lr": 0.5,
        "model": "toy",
        "data.drop_last": True,
        "data.batch_size": 8,
    }
    logger = TensorBoardLogger(tmp_path)
    logger.scalars({"val/loss": 0.5, "val/accuracy": 0.75}, 10)
    logger.hparams(params, {"val/loss": 0.5, "val/accuracy": 0.875, "test/loss": 0.25})
    logger.close()

    data = hparams_data(tmp_path)
    given = data["_hparams_/session_start_info"].session_start_info.hparams
    values = {name: getattr(value, value.WhichOneof("kind")) for name, value in given.items()}
    assert values == params
    metrics = data["_hparams_/experiment"].experiment.metric_infos
    assert [metric.name.tag for metric in metrics] == ["val/loss", "val/accuracy", "test/loss"]
    assert "_hparams_/session_end_info" in data
    # The tab shows a metric's latest point: the value given, written again only where it was not the latest.
    assert points(tmp_path, "val/loss") == [(10, 0.5)]
    assert points(tmp_path, "val/accuracy") == [(10, 0.75), (10, 0.875)]
    assert points(tmp_path, "test/loss") == [(10, 0.25)]


def test_purge_step_hides_what_a_resumed_run_logs_again(tmp_path: Path) -> None:
    first = TensorBoardLogger(tmp_path)
    for step in (10, 20, 30):
        first.scalars({"loss": float(step)}, step)
    first.text("config", "seed: 42")
    first.close()
    second = TensorBoardLogger(tmp_path, purge_step=20)
    second.scalars({"loss": 2.0}, 20)
    second.close()
    assert points(tmp_path, "loss") == [(10, 10.0), (20, 2.0)]
    assert read(tmp_path).Tags()["tensors"] == ["config/text_summary"]


class _Noisy(nn.Module):
    """Draws random numbers and has statistics that training would change."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = self.norm(x)
        return normed + torch.rand_like(x)


def test_graph_is_written_and_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    model = _Noisy()
    before = torch.get_rng_state(), {name: value.clone() for name, value in model.state_dict().items()}
    logger = TensorBoardLogger(tmp_path, graph=True)
    logger.graph(model, torch.ones(3, 2))
    logger.close()
    assert read(tmp_path).Tags()["graph"]
    assert model.training
    assert torch.equal(torch.get_rng_state(), before[0])
    torch.testing.assert_close(dict(model.state_dict()), before[1], rtol=0, atol=0)


def test_graph_is_written_on_request_only(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    logger.graph(nn.Linear(2, 1), torch.ones(3, 2))
    logger.close()
    assert not read(tmp_path).Tags()["graph"]


class _Untraceable(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("cannot be traced\nand more")


def test_model_that_cannot_be_traced_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = TensorBoardLogger(tmp_path, graph=True)
    with caplog.at_level(logging.WARNING):
        logger.graph(_Untraceable(), torch.ones(3, 2))
    logger.scalars({"loss": 0.5}, 1)
    logger.close()
    assert "_Untraceable is not written, it cannot be traced: cannot be traced" in caplog.text
    assert capsys.readouterr().out == ""
    assert points(tmp_path, "loss") == [(1, 0.5)]


# --- CSV -------------------------------------------------------------------------------------------------------------


def test_csv_has_a_row_a_step_and_a_column_a_name(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    logger.scalars({"train/loss": 0.1, "lr": 0.5}, 1)
    logger.scalars({"train/loss": 0.25, "lr": 0.5}, 2)
    logger.scalars({"val/loss": 1e-20}, 2)
    logger.scalars({"train/loss": 0.125, "odd, name": 3.0}, 3)
    logger.close()
    assert (tmp_path / "metrics.csv").read_text() == (
        'step,train/loss,lr,val/loss,"odd, name"\n1,0.1,0.5,,\n2,0.25,0.5,1e-20,\n3,0.125,,,3.0\n'
    )
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv"]


def test_csv_flush_makes_rows_visible_while_the_run_goes_on(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, flush_secs=3600)
    logger.scalars({"loss": 0.5}, 1)
    logger.flush()
    assert column(tmp_path, "loss") == [(1, 0.5)]
    logger.scalars({"loss": 2.0}, 2)
    logger.flush()
    logger.scalars({"loss": 0.25, "val/loss": 4.0}, 2)  # the row is in the file already, the column is not
    logger.flush()
    logger.flush()
    assert column(tmp_path, "loss") == [(1, 0.5), (2, 0.25)]
    logger.scalars({"loss": 8.0}, 3)
    logger.close()
    assert column(tmp_path, "loss") == [(1, 0.5), (2, 0.25), (3, 8.0)]
    assert column(tmp_path, "val/loss") == [(2, 4.0)]


def test_csv_keeps_many_rows_in_order(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    for step in range(1, 2501):
        logger.scalars({"loss": step / 2}, step)
        if step % 700 == 0:
            logger.scalars({f"val/{step}": 1.0}, step)
    logger.close()
    assert column(tmp_path, "loss") == [(step, step / 2) for step in range(1, 2501)]
    assert column(tmp_path, "val/1400") == [(1400, 1.0)]


def test_csv_rows_are_written_after_flush_secs(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, flush_secs=0)
    for step in (1, 2, 3):
        logger.scalars({"loss": float(step)}, step)
    assert column(tmp_path, "loss") == [(1, 1.0), (2, 2.0)]
    logger.close()


@pytest.mark.parametrize("torn", ["", "4,0.", "3,1", "3,1.0,2.0\n", ",,,"])
def test_csv_purge_step_removes_what_a_resumed_run_logs_again(torn: str, tmp_path: Path) -> None:
    first = CSVLogger(tmp_path)
    for step in (1, 2, 3):
        first.scalars({"loss": float(step), "lr": 0.1}, step)
    first.close()
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write(torn)
    second = CSVLogger(tmp_path, purge_step=3)
    assert column(tmp_path, "loss") == [(1, 1.0), (2, 2.0)]
    second.scalars({"val/loss": 7.0}, 2)  # as where the kill came between a save and its validation
    second.scalars({"loss": 5.0}, 3)
    second.close()
    assert column(tmp_path, "loss") == [(1, 1.0), (2, 2.0), (3, 5.0)]
    assert column(tmp_path, "lr") == [(1, 0.1), (2, 0.1)]
    assert column(tmp_path, "val/loss") == [(2, 7.0)]


def test_csv_goes_on_after_everything_was_purged(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").touch()
    for purge_step in (None, 1):
        logger = CSVLogger(tmp_path, purge_step=purge_step)
        logger.scalars({"loss": 5.0}, 1)
        logger.close()
        assert column(tmp_path, "loss") == [(1, 5.0)]


def test_csv_hparams_are_a_yaml_chosen_ones_first(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    logger.hparams({"seed": 1, "model": "Toy", "optimizer.lr": 0.5}, {"val/loss": 1.0}, chosen=["optimizer.lr"])
    logger.close()
    assert (tmp_path / "hparams.yaml").read_text() == "optimizer.lr: 0.5\nseed: 1\nmodel: Toy\n"


def test_csv_has_the_latest_picture_of_each_name(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    for png in (b"first", b"second"):
        logger.image("val/confusion", png)
    logger.close()
    assert [path.read_bytes() for path in tmp_path.rglob("*.png")] == [b"second"]
    assert not list(tmp_path.rglob("*.tmp"))


# --- trackers --------------------------------------------------------------------------------------------------------


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep W&B from the network."""
    for name, value in QUIET.items():
        monkeypatch.setenv(name, value)


@pytest.mark.slow
@pytest.mark.usefixtures("quiet")
@needs("wandb")
def test_wandb_goes_on_from_an_older_checkpoint(tmp_path: Path) -> None:
    from ddp_recipes.loggers.wandb import WandbLogger

    for purge_step, last in ((None, 6), (4, 5)):
        logger = WandbLogger(tmp_path / "wandb", purge_step, mode="offline", project="ours", tags=["a"])
        for step in range(purge_step or 1, last + 1):
            logger.scalars({"loss": step / (purge_step or 1)}, step)
        logger.image("val/confusion", PNG)
        logger.text("config", "seed: 42")
        logger.flush()
        logger.hparams({"optimizer.lr": 0.1}, {"loss": 0.5})
        logger.finish("finished")
        logger.close()
    assert wandb_points(tmp_path, "loss") == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 1.0), (5, 1.25)]
    assert [row["_step"] for row in wandb_rows(tmp_path) if "val/confusion/_type" in row] == [5]
    assert wandb_exit_code(tmp_path) == 0
    configs = [each.config for each in wandb_records(tmp_path) if each.WhichOneof("record_type") == "config"]
    assert {item.key: item.value_json for config in configs for item in config.update}["optimizer.lr"] == "0.1"
    assert len(list((tmp_path / "wandb").glob("offline-run-*"))) == 1
    (kept,) = (tmp_path / "wandb").glob("offline-run-*/files/config.md")
    assert kept.read_text() == "seed: 42"


@pytest.mark.usefixtures("quiet")
@needs("wandb")
@pytest.mark.slow
def test_wandb_has_every_step_though_a_validation_has_more_batches(tmp_path: Path) -> None:
    from ddp_recipes.loggers.wandb import WandbLogger

    logger = WandbLogger(tmp_path / "wandb", mode="offline", project="ours")
    for step in (1, 2, 3):
        logger.scalars({"loss": step / 4}, step)
        for batch in range(10):
            logger.of_batch({"val": step + batch / 16}, 10 * step + batch, step)
    logger.close()
    assert wandb_points(tmp_path, "loss") == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert wandb_points(tmp_path, "val") == [(step, step + 9 / 16) for step in (1, 2, 3)]


@pytest.mark.usefixtures("quiet")
@needs("wandb")
@pytest.mark.slow
def test_wandb_records_of_one_second_replace_each_other(tmp_path: Path) -> None:
    from ddp_recipes.loggers.wandb import WandbLogger

    for purge_step in (None, 2, 3):
        logger = WandbLogger(tmp_path / "wandb", purge_step, mode="offline", project="ours")
        logger.scalars({"loss": 0.5}, purge_step or 1)
        logger.close()
        (record,) = (tmp_path / "wandb").glob("offline-run-*")
        record.rename(record.with_name("offline-run-20261124_120000-ours"))
    assert wandb_points(tmp_path, "loss") == [(1, 0.5), (2, 0.5), (3, 0.5)]
    names = [f"offline-run-20261124_120000-ours{end}" for end in ("", ".1")]
    assert sorted(path.name for path in (tmp_path / "wandb" / "replaced").iterdir()) == names


# --- several ---------------------------------------------------------------------------------------------------------


def test_several_loggers_get_everything(tmp_path: Path) -> None:
    logger = Loggers([TensorBoardLogger(tmp_path / "tensorboard", graph=True), CSVLogger(tmp_path / "csv"), Logger()])
    logger.scalars({"loss": 0.5}, 1)
    logger.text("config", "seed: 42")
    logger.graph(nn.Linear(2, 1), torch.ones(3, 2))
    logger.flush()
    assert points(tmp_path / "tensorboard", "loss") == column(tmp_path / "csv", "loss") == [(1, 0.5)]
    logger.hparams({"optimizer.lr": 0.1}, {"loss": 0.5})
    logger.close()
    assert read(tmp_path / "tensorboard").Tags()["graph"]
    assert (tmp_path / "csv" / "hparams.yaml").exists()
    assert logger.see_with("run") == "tensorboard --logdir run\ncolumn -s, -t run/csv/metrics.csv"


class _Noting(Logger):
    def __init__(self) -> None:
        self.noted: list[object] = []

    def parameters(self, params: Mapping[str, bool | int | float | str]) -> None:
        self.noted.append(dict(params))

    def finish(self, status: str) -> None:
        self.noted.append(status)


def test_several_loggers_are_told_what_is_given_and_how_it_ends() -> None:
    loggers = [_Noting(), Logger(), _Noting()]
    logger = Loggers(loggers)
    logger.parameters({"optimizer.lr": 0.1})
    logger.finish("preempted")
    assert [each.noted for each in loggers if isinstance(each, _Noting)] == [[{"optimizer.lr": 0.1}, "preempted"]] * 2


def test_copy_of_what_holds_a_logger_logs_to_the_same() -> None:
    logger = _Noting()
    assert copy.deepcopy({"task": [logger]})["task"][0] is logger


class _Failing(Logger):
    def close(self) -> None:
        raise OSError("disk full")


def test_several_loggers_are_closed_though_one_fails(tmp_path: Path) -> None:
    logger = Loggers([_Failing(), CSVLogger(tmp_path)])
    logger.scalars({"loss": 0.5}, 1)
    with pytest.raises(OSError, match="disk full"):
        logger.close()
    assert column(tmp_path, "loss") == [(1, 0.5)]


def test_folder_is_that_of_the_class() -> None:
    class LinesLogger(Logger):
        pass

    class OwnBoard(TensorBoardLogger):
        pass

    class Elsewhere(Logger):
        folder = "numbers"

    assert [each.folder for each in (LinesLogger, OwnBoard, Elsewhere)] == ["lines", "tensorboard", "numbers"]
    assert LinesLogger().see_with("run") is None


@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
@pytest.mark.parametrize("kept", [1, 5, 9], ids=lambda kept: f"{kept} batches before the checkpoint")
def test_points_of_batches_are_there_once_after_a_resume(
    kind: type[CSVLogger | TensorBoardLogger], kept: int, tmp_path: Path
) -> None:
    """A checkpoint after step 2, and so many batches; the start before it had come to step 3 and the tenth."""
    for purge_step, steps, batches in ((None, (1, 2, 3), range(10)), (3, (3, 4), range(kept, 12))):
        logger = kind(tmp_path, purge_step)
        for step in steps:
            logger.scalars({"loss": step}, step)
        for batch in batches:
            logger.of_batch({"val": batch / 4, "other": batch / 2}, batch, 3)
        logger.close()
    read_points = column if kind is CSVLogger else points
    found = {name: sorted(read_points(tmp_path, name)) for name in ("loss", "val", "other")}
    assert found["loss"] == [(step, step) for step in (1, 2, 3, 4)]
    assert found["val"] == [(batch, batch / 4) for batch in range(12)]
    assert found["other"] == [(batch, batch / 2) for batch in range(12)]


@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
def test_points_of_batches_are_there_where_a_run_goes_on_and_has_no_more(
    kind: type[CSVLogger | TensorBoardLogger], tmp_path: Path
) -> None:
    first = kind(tmp_path)
    first.scalars({"loss": 1}, 1)
    for batch in range(5):
        first.of_batch({"val": batch / 4, "other": batch / 2}, batch, 1)
    first.close()
    again = kind(tmp_path, purge_step=2)
    again.go_on({"val": 5, "other": 4})  # a fifth batch of the other came after the checkpoint
    again.close()
    read_points = column if kind is CSVLogger else points
    assert sorted(read_points(tmp_path, "loss")) == [(1, 1)]
    assert sorted(read_points(tmp_path, "val")) == [(batch, batch / 4) for batch in range(5)]
    assert sorted(read_points(tmp_path, "other")) == [(batch, batch / 2) for batch in range(4)]
