"""A non-finite loss or weights: all ranks stop at one step, the rank is named, the good checkpoint stays."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddp_recipes.checkpointing.reading import load
from ddp_recipes.errors import RunFailed
from ddp_recipes.reporting.run_directory import Summary
from helpers.marks import quick_each, slow_but

Run = Callable[..., Summary]

LONG = ["data.global_batch_size=8", "trainer.max_epochs=4", "checkpoint.every_n_steps=4", "checkpoint.save_top_k=-1"]
POISON = [*LONG, "model._target_=own_parts.Poisoned", "+model.value=nan"]


def failed(run: Run, folder: Path, *overrides: str, world_size: int) -> dict[str, Any]:
    """Run into the failure and return the summary that is left."""
    with pytest.raises(RunFailed):
        run(*overrides, directory=folder, world_size=world_size)
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "failed"
    return summary


def steps(folder: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("step_")) for path in (folder / "checkpoints").glob("step_*.pt"))


@pytest.mark.parametrize("value", quick_each(2, ["nan", "inf"]))
@pytest.mark.parametrize(("world_size", "rank"), slow_but([(2, 1)], [(1, 0), (2, 1), (3, 0)]))
def test_a_loss_that_is_no_number_stops_all_where_it_is_logged(
    world_size: int, rank: int, value: str, run: Run, tmp_path: Path
) -> None:
    poison = [*POISON, f"+model.rank={rank}", "+model.step=6", f"model.value={value}", "trainer.log_every_n_steps=7"]
    summary = failed(run, tmp_path, *poison, world_size=world_size)
    where = f" on rank {rank}" if world_size > 1 else ""
    error = summary["error"]
    assert error.startswith(f"rank {rank}: At step 7 the loss is nan; the first non-finite loss was{where} at step 6.")
    assert "the last checkpoint, of step 4, is good" in error
    assert summary["global_step"] == 7
    traces = [(tmp_path / "ranks" / f"rank_{number}.txt").read_text() for number in range(world_size)]
    assert len(set(traces)) == 1, "all ranks stopped alike"
    assert steps(tmp_path) == [4]
    resumed = run(*LONG, "ckpt_path=auto", directory=tmp_path, world_size=world_size)
    assert resumed["weights_sha256"] == run(*LONG, world_size=world_size)["weights_sha256"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_weights_that_are_no_numbers_are_not_saved(world_size: int, run: Run, tmp_path: Path) -> None:
    rank = world_size - 1
    summary = failed(run, tmp_path, *POISON, f"+model.rank={rank}", "+model.step=6", world_size=world_size)
    assert (
        "After step 8 the model's weights (net1.weight, net1.bias, net2.weight, …) are non-finite" in summary["error"]
    )
    assert "at step 6" in summary["error"]
    assert summary["global_step"] == 8
    assert steps(tmp_path) == [4]
    assert Path(summary["last_checkpoint"]).samefile(tmp_path / "checkpoints" / "step_00000004.pt")


def test_gradients_that_are_no_numbers_are_found_before_the_save(run: Run, tmp_path: Path) -> None:
    summary = failed(run, tmp_path, "model._target_=own_parts.Rooted", world_size=2)
    assert "After step 4 the model's weights" in summary["error"]
    assert "there is no earlier one" in summary["error"]
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.slow
def test_a_buffer_of_any_rank_counts_and_a_mask_of_infinities_does_not(run: Run, tmp_path: Path) -> None:
    buffered = [*LONG, "model._target_=own_parts.Buffered"]
    summary = failed(run, tmp_path, *buffered, "+model.rank=1", world_size=2)
    assert summary["error"].startswith("rank 1: After step 4 the model's weights (count) are non-finite on rank 1.")
    assert run(*buffered, "+model.rank=7", world_size=2)["status"] == "finished"


def test_steps_that_16_mixed_skips_stop_nothing(run: Run) -> None:
    loud = ["model._target_=own_parts.Loud", "optimizer.lr=1e-6", "trainer.precision=16-mixed"]
    summary = run(*LONG, *loud, "trainer.log_every_n_steps=1", world_size=2)
    assert summary["status"] == "finished"
    state = load(Path(summary["last_checkpoint"]))
    assert state["precision"]["scale"] < 65536, "otherwise no step was skipped and this test shows nothing"


@pytest.mark.slow
def test_without_checkpoints_it_stops_all_the_same(run: Run, tmp_path: Path) -> None:
    poison = [*POISON, "+model.rank=0", "+model.step=6", "checkpoint=none"]
    assert "there is no earlier one" in failed(run, tmp_path, *poison, world_size=2)["error"]
