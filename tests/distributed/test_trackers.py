"""Trackers: each point once after a kill, the same run after a resume, its end told, and refusals in time."""

import contextlib
import csv
import os
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ddp_recipes.errors import Preempted, RequestError
from ddp_recipes.loggers.mlflow import MLflowLogger
from ddp_recipes.reporting.run_directory import Summary
from helpers.marks import quick_each, slow_but
from helpers.processes import ran, started
from helpers.trackers import (
    QUIET,
    mlflow_client,
    mlflow_points,
    wandb_exit_code,
    wandb_points,
    wandb_records,
    wandb_rows,
)

Run = Callable[..., Summary]

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:mlflow")  # of what MLflow does with SQLAlchemy

FEW = ["trainer.log_every_n_steps=1", "data.global_batch_size=8", "checkpoint.every_n_steps=3", "ckpt_path=auto"]
ALL = "logger=[wandb,mlflow,csv,tensorboard]"
KILL = "+callbacks.killed={{_target_: own_parts.Signalled, where: {}, step: {}, rank: 0, name: {}}}"
PARTS = Path(__file__).with_name("own_parts.py")


@pytest.fixture(autouse=True)
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep trackers from the network, and what MLflow puts into the current folder in the test's own."""
    monkeypatch.chdir(tmp_path)
    for name, value in QUIET.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database of MLflow without runs; to make one takes seconds."""
    path = tmp_path_factory.mktemp("mlflow") / "empty.db"
    before = dict(os.environ)
    os.environ.update(QUIET)
    from mlflow.tracking import MlflowClient

    with contextlib.chdir(path.parent):  # where MLflow puts the files of runs
        MlflowClient(f"sqlite:///{path}").search_experiments()
    os.environ.clear()
    os.environ.update(before)
    return path


def csv_points(run: Path, name: str, file: str = "csv/metrics.csv") -> list[tuple[int, float]]:
    with (run / file).open(newline="") as table:
        return [(int(row["step"]), float(row[name])) for row in csv.DictReader(table) if row[name]]


def steps(points: list[tuple[int, float]]) -> list[int]:
    return [step for step, _ in points]


@pytest.mark.nightly
@pytest.mark.spawn
def test_every_tracker_has_each_step_once_after_kill_9(tmp_path: Path) -> None:
    shutil.copy(PARTS, tmp_path)
    overrides = [ALL, *FEW, "data=random", "data.num_samples=64", "data.val_samples=21", "model=toy", "strategy=ddp"]
    overrides += ["trainer.max_epochs=2", "hydra.run.dir=run", "launcher.nproc_per_node=2", "launcher.device=cpu"]
    environ = {**QUIET, "PYTHONPATH": str(tmp_path)}
    with started(tmp_path, *overrides, KILL.format("step", 11, "SIGKILL"), environ=environ) as run:
        assert run.end().status == 1  # and no process is left, W&B's neither
    killed, folder = csv_points(tmp_path / "run", "train/loss"), tmp_path / "run"
    ids = [(folder / each / "run_id").read_text() for each in ("wandb", "mlflow")]
    ended = ran(tmp_path, *overrides, environ=environ)
    assert ended.status == 0, ended.err
    assert [(folder / each / "run_id").read_text() for each in ("wandb", "mlflow")] == ids

    board = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    for name, expected in {"train/loss": list(range(1, 17)), "val/loss": [8, 16]}.items():
        points = csv_points(folder, name)
        assert steps(points) == expected
        assert wandb_points(folder, name) == points
        assert mlflow_points(folder, name) == points
        assert steps([(event.step, event.value) for event in board.Scalars(name)]) == expected
    assert killed[:9] == csv_points(folder, "train/loss")[:9]
    assert wandb_exit_code(folder) == 0
    client, run_id = mlflow_client(folder)
    found = client.get_run(run_id)
    assert found.info.status == "FINISHED"
    assert found.data.params["optimizer.lr"] == "0.05"
    assert "wandb sync run/wandb/offline-run-*" in ended.out
    assert "mlflow ui --backend-store-uri sqlite:///run/mlflow/mlflow.db" in ended.out


@pytest.mark.parametrize("where", slow_but([], ["step", "validated", "saved"], ["saved"]))
def test_wandb_has_each_step_once_after_kill_9(where: str, run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    with pytest.raises(RuntimeError):
        run("logger=wandb", *FEW, KILL.format(where, 9 if where == "saved" else 8, "SIGKILL"), directory=folder)
    run("logger=wandb", *FEW, directory=folder)
    rows = wandb_rows(folder)
    assert [row["_step"] for row in rows if "train/loss" in row] == list(range(1, 17))
    assert [row["_step"] for row in rows if "val/loss" in row] == [8, 16]
    assert wandb_points(folder, "val/loss") == csv_points(folder, "val/loss", "wandb/metrics.csv")
    assert (folder / "wandb" / "replaced").is_dir()


@pytest.mark.slow
def test_trackers_are_told_how_a_run_ends(run: Run, tmp_path: Path, database: Path) -> None:
    uri = f"sqlite:///{database}"
    trackers = ["logger=[wandb,mlflow]", f"logger.mlflow.tracking_uri={uri}", "logger.mlflow.run_name=ours", *FEW]
    trackers += ["logger.wandb.name=ours", "logger.wandb.tags=[a,b]", "+logger.mlflow.tags.a=b"]
    folder = tmp_path / "run"
    with pytest.raises(RuntimeError, match="the cat"):
        run(*trackers, "+callbacks.bad={_target_: trackers_parts.Raises, step: 7}", directory=folder)
    client, run_id = mlflow_client(folder, uri)
    assert client.get_run(run_id).info.status == "FAILED"
    assert wandb_exit_code(folder) == 1
    with pytest.raises(Preempted):
        run(*trackers, KILL.format("step", 8, "SIGTERM"), directory=folder)
    assert client.get_run(run_id).info.status == "KILLED"
    assert wandb_exit_code(folder) == 75
    assert any(each.WhichOneof("record_type") == "preempting" for each in wandb_records(folder))
    run(*trackers, directory=folder)
    found = client.get_run(run_id)
    assert (found.info.status, found.info.run_name, found.data.tags["a"]) == ("FINISHED", "ours", "b")
    assert steps(mlflow_points(folder, "train/loss", uri)) == list(range(1, 17))
    (begun,) = (each.run for each in wandb_records(folder) if each.WhichOneof("record_type") == "run")
    assert (begun.run_id, begun.display_name, list(begun.tags)) == (
        (folder / "wandb" / "run_id").read_text(),
        "ours",
        ["a", "b"],
    )


def test_tasks_reach_the_loggers(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run("logger=csv", *FEW, "task._target_=trackers_parts.Telling", directory=folder, world_size=2)
    assert csv_points(folder, "train/twice") == [(step, 2.0 * step) for step in range(1, 17)]


@pytest.mark.parametrize(
    ("overrides", "message"),
    quick_each(
        2,
        [
            (["logger=wandb", "logger.mode=onlin"], "Did you mean 'online'"),
            (["logger=wandb", "logger.mode=online"], "needs an API key"),
            (["logger=[csv,wandb]", "logger.wandb.mode=disabled"], "logger.wandb.mode=disabled is not known"),
            (["logger=wandb", "+logger.projekt=x"], "Did you mean 'project'"),
            (["logger=mlflow", "logger.tracking_uri=mlruns"], "is a folder"),
            (["logger=mlflow", "logger.tracking_uri=bogus://here"], "does not answer"),
        ],
    ),
)
def test_wrong_tracker_is_refused_before_anything_is_written(
    overrides: list[str], message: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "mlflow" if "logger=mlflow" in overrides else "wandb"
    if find_spec(name) is None:
        pytest.skip(f"needs the package {name}, of the extra peers")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    monkeypatch.delenv("WANDB_MODE")
    with pytest.raises(RequestError) as refused:
        run(*overrides, directory=tmp_path / "run")
    assert message in str(refused.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("package", ["wandb", "mlflow"])
def test_missing_package_says_what_to_install(
    package: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ddp_recipes.loggers.base as base

    found: Callable[[str], Any] = base.find_spec
    monkeypatch.setattr(base, "find_spec", lambda name: None if name == package else found(name))
    with pytest.raises(RequestError, match=rf"Install\s+ddp-recipes\[{package}\]"):
        run(f"logger={package}", directory=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_mlflow_has_points_of_batches_once_after_a_resume(tmp_path: Path, database: Path) -> None:
    """A checkpoint after step 2, and one batch; the start before it had come to step 3 and the fourth."""
    uri = f"sqlite:///{database}"
    for purge_step, numbers, batches in ((None, (1, 2, 3), range(4)), (3, (3, 4), range(1, 6))):
        logger = MLflowLogger(tmp_path / "run" / "mlflow", purge_step, tracking_uri=uri)
        for step in numbers:
            logger.scalars({"loss": step}, step)
        for batch in batches:
            logger.of_batch({"val": batch}, batch, 3)
        logger.close()
    assert sorted(steps(mlflow_points(tmp_path / "run", "loss", uri))) == [1, 2, 3, 4]
    assert sorted(steps(mlflow_points(tmp_path / "run", "val", uri))) == [0, 1, 2, 3, 4, 5]
