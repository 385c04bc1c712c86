"""Data sets of a user's own: what they ask for is done, or refused by name."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ddp_recipes.errors import RequestError
from ddp_recipes.reporting.run_directory import Summary

Run = Callable[..., Summary]

SET = "{_target_: ddp_recipes.datasets.random_regression, in_features: 10, out_features: 5"
CLEAN, NOISY = f"{SET}, num_samples: 21, split: val}}", f"{SET}, num_samples: 13, split: test, seed: 7}}"
SEVERAL = ("~data.val", f"+data.val={{clean: {CLEAN}, noisy: {NOISY}}}")


def val_metrics(summary: Summary) -> dict[str, float]:
    return {name: value for name, value in summary["metrics"].items() if name.startswith("val/")}


def test_several_validation_sets_are_measured_by_name(run: Run) -> None:
    one = run(*SEVERAL)
    assert set(val_metrics(one)) == {"val/clean/loss", "val/clean/mae", "val/noisy/loss", "val/noisy/mae"}
    assert one["monitor"] == "val/clean/loss"
    assert one["objective"] == one["metrics"]["val/clean/loss"] != one["metrics"]["val/noisy/loss"]
    log = (Path(one["run_directory"]) / "train.log").read_text()
    assert "checkpoint.monitor=auto is val/clean/loss, of the first of val/clean, val/noisy." in log
    assert json.loads((Path(one["run_directory"]) / "summary.json").read_text())["best_checkpoint"]

    weights = f"ckpt_path={one['last_checkpoint']}"
    for name, node in (("clean", CLEAN), ("noisy", NOISY)):
        alone = run("mode=validate", weights, "~data.val", f"+data.val={node}")["metrics"]
        assert alone == {f"val/{key}": pytest.approx(one["metrics"][f"val/{name}/{key}"]) for key in ("loss", "mae")}
    several = run("mode=validate", weights, *SEVERAL, world_size=2)
    assert several["metrics"] == pytest.approx(val_metrics(one))


def test_a_task_is_told_which_set_comes(run: Run, tmp_path: Path) -> None:
    task = ("task._target_=data_parts.Announced", f"+task.folder={tmp_path}")
    run(*task, *SEVERAL, "trainer.max_epochs=1", "trainer.num_sanity_val_steps=0")
    assert (tmp_path / "announced").read_text() == "val 0, val 1, "


def test_wrong_sets_are_refused(run: Run) -> None:
    with pytest.raises(RequestError, match=r"mode=predict writes .* val has several: val/clean, val/noisy"):
        run("mode=predict", *SEVERAL)
    with pytest.raises(RequestError, match=r"checkpoint.monitor=val/loss is not measured.*val/clean/loss"):
        run(*SEVERAL, "checkpoint.monitor=val/loss")
    with pytest.raises(RequestError, match=r"data.train has no _target_, but a, b: one set is trained on"):
        run("~data.train", f"+data.train={{a: {CLEAN}, b: {CLEAN}}}")
    with pytest.raises(RequestError, match=r"data.val.clean has no _target_"):
        run("~data.val", "+data.val={clean: {a: 1}}")
    with pytest.raises(RequestError, match=r"data.val=7 is no data set"):
        run("data.val=7")
