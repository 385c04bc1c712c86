"""Loggers, read back as TensorBoard reads them."""

import logging
from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2
from torch import Tensor, nn

from ddp_recipes.loggers import Logger, TensorBoardLogger

CONF = Path(__file__).parents[2] / "conf" / "logger"


def read(directory: Path) -> EventAccumulator:
    return EventAccumulator(str(directory), size_guidance={"scalars": 0}).Reload()


def points(directory: Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in read(directory).Scalars(tag)]


def hparams_data(directory: Path) -> dict[str, plugin_data_pb2.HParamsPluginData]:
    contents = read(directory).PluginTagToContent("hparams")
    return {tag: plugin_data_pb2.HParamsPluginData.FromString(content) for tag, content in contents.items()}


@pytest.mark.parametrize("option", ["none", "tensorboard"])
def test_yaml_makes_a_logger(option: str, tmp_path: Path) -> None:
    make = instantiate(OmegaConf.load(CONF / f"{option}.yaml"))
    logger = make(directory=tmp_path / "tensorboard", purge_step=None)
    logger.scalars({"loss": 1.0}, 1)
    logger.close()
    assert isinstance(logger, Logger)
    assert (tmp_path / "tensorboard").exists() == (option == "tensorboard")


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
