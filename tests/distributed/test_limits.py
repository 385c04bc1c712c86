"""When a run ends: the first limit that is reached, on all ranks at one step."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddp_recipes.reporting.run_directory import Summary
from helpers.marks import quick_each, slow_but
from helpers.patience import patience

Run = Callable[..., Summary]
Notes = Callable[[], list[dict[str, Any]]]


STEPS: list[tuple[list[str], int]] = [
    ([], 8),
    (["trainer.max_epochs=3"], 12),
    (["trainer.max_steps=3"], 3),
    (["trainer.max_steps=100"], 8),
    (["trainer.max_epochs=-1", "trainer.max_steps=10"], 10),
    (["trainer.max_epochs=0"], 0),
    (["trainer.limit_train_batches=3"], 6),
    (["trainer.limit_train_batches=0.5"], 4),
    (["trainer.overfit_batches=1"], 2),
    (["trainer.accumulate_grad_batches=3"], 4),
    (["trainer.accumulate_grad_batches=3", "trainer.limit_train_batches=3"], 2),
    (["data.drop_last=true", "data.num_samples=70"], 8),
    (["trainer.fast_dev_run=true"], 1),
    (["trainer.fast_dev_run=3"], 3),
]


@pytest.mark.parametrize(
    ("overrides", "steps"),
    slow_but(STEPS[::3], STEPS),
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_steps_of_a_run(overrides: list[str], steps: int, run: Run, notes: Notes, noting: str) -> None:
    summary = run(noting, *overrides, world_size=2)
    assert summary["status"] == "finished"
    assert summary["global_step"] == steps
    assert [note["steps"] for note in notes()] == [list(range(1, steps + 1))] * 2


@pytest.mark.slow
def test_time_stops_all_ranks_at_one_step(run: Run, notes: Notes, noting: str) -> None:
    overrides = ["trainer.max_epochs=-1", f"trainer.max_time={patience(0.5)}", "data.num_samples=100000"]
    summary = run(noting, *overrides, "data.batch_size=1", "optimizer.lr=1e-4", world_size=2)
    first, second = (note["steps"] for note in notes())
    assert first == second
    assert len(first) == summary["global_step"] > 10
    assert summary["status"] == "finished"
    assert summary["epoch"] == 0
    assert Path(summary["last_checkpoint"]).exists(), "what was learned is kept"


def test_time_counts_from_the_first_step_on(run: Run) -> None:
    slow = "+callbacks.slow={_target_: own_parts.SlowToStart, sleep_s: 0.1}"
    assert run(slow, "trainer.max_time=0.05", "trainer.max_steps=1", world_size=2)["global_step"] == 1


@pytest.mark.parametrize("world_size", quick_each(2, [2, 1]))
def test_early_stopping(world_size: int, run: Run, notes: Notes, noting: str) -> None:
    stopping = ["callbacks=early_stopping", "callbacks.early_stopping.patience=2", "optimizer.lr=0"]
    summary = run(*stopping, noting, "trainer.max_epochs=50", world_size=world_size)
    assert summary["epoch"] == 3, "one to compare with and two that are no better"
    assert len({tuple(note["steps"]) for note in notes()}) == 1
    patient = run(*stopping[:2], "trainer.max_epochs=4", world_size=world_size)
    assert patient["epoch"] == 4, "it goes on while it gets better"


@pytest.mark.parametrize("world_size", [1, 2])
def test_fast_dev_run_leaves_no_checkpoint_and_no_events(world_size: int, run: Run) -> None:
    summary = run("debug=fast_dev_run", "logger=tensorboard", world_size=world_size)
    assert {path.name for path in Path(summary["run_directory"]).iterdir()} == {
        "config.yaml",
        "train.log",
        "summary.json",
    }
    assert summary["best_checkpoint"] is summary["last_checkpoint"] is None
    assert {"train/loss", "val/loss"} <= set(summary["metrics"])


@pytest.mark.slow
def test_overfitting_sees_the_same_batches_again(run: Run) -> None:
    start = run("debug=overfit", "trainer.max_epochs=1", "optimizer.lr=0", world_size=2)["metrics"]["val/loss"]
    summary = run("debug=overfit", "model.hidden_features=64", "trainer.max_epochs=60", world_size=2)
    assert summary["samples_seen"] == 60 * 3 * 16
    assert summary["metrics"]["val/loss"] < 0.1 * start


def test_one_batch_of_everything_has_a_validation_however_rare_they_are(run: Run) -> None:
    found = run("trainer.fast_dev_run=true", "trainer.val_check_interval=9", "trainer.check_val_every_n_epoch=5")
    assert "val/loss" in found["metrics"]


@pytest.mark.parametrize(
    ("interval", "message"),
    [
        ("val_check_interval=9", "is more than the 8 batches of an epoch, so nothing is ever validated."),
        ("check_val_every_n_epoch=2", "is more than trainer.max_epochs=1, so nothing is ever validated."),
    ],
)
def test_an_interval_that_is_never_reached_is_named(interval: str, message: str, run: Run, tmp_path: Path) -> None:
    run(f"trainer.{interval}", "trainer.max_epochs=1", directory=tmp_path / "run")
    assert f"trainer.{interval} {message}" in (tmp_path / "run" / "train.log").read_text()


@pytest.mark.parametrize("task", [[], ["model._target_=own_parts.Lit", "task=lightning"]])
def test_no_batch_of_validation_is_none(task: list[str], run: Run) -> None:
    found = run(*task, "trainer.limit_val_batches=0", "trainer.max_epochs=1")
    assert found["status"] == "finished"
    assert not [name for name in found["metrics"] if name.startswith("val")]
    assert found["monitor"] == "train/loss"


def test_limits_of_validation(run: Run) -> None:
    whole = run("data.val_batch_size=9")["metrics"]["val/loss"]
    few = run("data.val_batch_size=3", "trainer.limit_val_batches=3")["metrics"]["val/loss"]
    shorter = run("data.val_batch_size=9", "trainer.limit_val_batches=1")["metrics"]["val/loss"]
    assert few == pytest.approx(shorter, rel=1e-6)
    assert few != pytest.approx(whole)
