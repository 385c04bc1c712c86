"""A save that fails ends the run on all ranks, says what was needed, and costs no earlier checkpoint."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddp_recipes.checkpointing.files import newest_first
from ddp_recipes.checkpointing.reading import load_first
from ddp_recipes.errors import RecipeError
from ddp_recipes.reporting.run_directory import Summary
from helpers.checkpoints import mounted
from helpers.marks import slow_but

Run = Callable[..., Summary]

RUN = ["data.num_samples=61", "data.global_batch_size=8", "data.val=null", "trainer.max_epochs=1000"]


def broken(step: int) -> str:
    return f"+callbacks.broken={{_target_: own_parts.Broken, step: {step}}}"


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_failed_save_ends_the_run_at_that_step(world_size: int, run: Run, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"step_00000008\.pt could not be written: File exists\. It needs about"):
        run(*RUN, "checkpoint.every_n_steps=4", broken(6), directory=tmp_path, world_size=world_size)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["global_step"]) == ("failed", 8)
    assert summary["error"].startswith("rank 0: ")
    assert load_first(newest_first(tmp_path / "good"))[1]["cursor"]["step"] == 4


@pytest.mark.parametrize("world_size", slow_but([2], [1, 2]))
def test_a_failed_async_save_ends_the_run_before_the_next_one(world_size: int, run: Run, tmp_path: Path) -> None:
    saving = ["checkpoint.every_n_steps=1000", "checkpoint.async_save=true", broken(999)]
    with pytest.raises(RecipeError, match=r"step_00001000\.pt could not be written: File exists"):
        run(*RUN, *saving, directory=tmp_path, world_size=world_size)
    assert 1000 <= json.loads((tmp_path / "summary.json").read_text())["global_step"] < 2000


@pytest.mark.slow
def test_a_failed_async_save_at_the_end_fails_the_run(run: Run, tmp_path: Path) -> None:
    saving = ["checkpoint.every_n_steps=8", "checkpoint.async_save=true", "trainer.max_steps=8", broken(7)]
    with pytest.raises(RecipeError, match=r"step_00000008\.pt could not be written"):
        run(*RUN, *saving, directory=tmp_path, world_size=2)
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "failed"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "small", "1m") as folder:
        yield folder


@pytest.mark.parametrize("async_save", ["false", "true"])
def test_a_disk_that_fills_up_ends_the_run_and_the_newest_one_stays_whole(
    async_save: str, run: Run, small_disk: Path
) -> None:
    saving = ["model.hidden_features=2000", "checkpoint.every_n_steps=4", "checkpoint.save_top_k=-1"]
    with pytest.raises(RecipeError, match=r"No space left on device\. It needs about 2\d\d,\d\d\d bytes; free on that"):
        run(*RUN, *saving, f"checkpoint.async_save={async_save}", directory=small_disk, world_size=2)
    checkpoints = newest_first(small_disk / "checkpoints")
    assert load_first(checkpoints)[0] == checkpoints[0]
    assert load_first(checkpoints)[2] == []
    assert not list((small_disk / "checkpoints").glob(".*"))
    assert json.loads((small_disk / "summary.json").read_text())["status"] == "failed"
