"""Going on from a checkpoint is as if the run had never stopped: the same bits."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ddp_recipes.checkpoint import load
from ddp_recipes.errors import RequestError
from ddp_recipes.run_directory import Summary

Run = Callable[..., Summary]

SAVING = ["data.num_samples=61", "trainer.max_epochs=3", "checkpoint.every_n_steps=1", "checkpoint.save_top_k=-1"]
MODELS = Path(__file__).parent

TRAINING = {
    "sgd with momentum": [],
    "adamw, cosine": ["optimizer=adamw", "scheduler=cosine"],
    "one_cycle": ["scheduler=one_cycle"],
    "dropout": ["model._target_=own_parts.Dropout"],
    "dropout, accumulation, clipping": [
        "model._target_=own_parts.Dropout",
        "trainer.accumulate_grad_batches=2",
        "trainer.gradient_clip_val=0.1",
    ],
    "batch norm": ["model._target_=own_parts.Norm"],
    "16-mixed": ["trainer.precision=16-mixed"],
    "async_save": ["checkpoint.async_save=true"],
    "sample by sample": ["model._target_=own_parts.Dropout", "data.train._target_=own_parts.OneByOne"],
    "workers": ["model._target_=own_parts.Dropout", "data.train._target_=own_parts.OneByOne", "data.num_workers=2"],
    "all together": [
        "model._target_=own_parts.Dropout",
        "data.train._target_=own_parts.OneByOne",
        "data.num_workers=2",
        "optimizer=adamw",
        "scheduler=cosine",
        "trainer.accumulate_grad_batches=2",
        "trainer.val_check_interval=3",
    ],
}


def stops(checkpoints: Path) -> Iterator[Path]:
    """Yield checkpoints of the middle and of the end of an epoch."""
    files = sorted(checkpoints.glob("step_*.pt"))
    cursors = {path: load(path)["cursor"] for path in files}
    yield next(path for path in files if cursors[path]["batch"] > 0)
    yield next(path for path in files if cursors[path]["batch"] == 0)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", TRAINING)
def test_a_resumed_run_ends_with_the_same_bits(name: str, world_size: int, run: Run) -> None:
    whole = run(*SAVING, *TRAINING[name], world_size=world_size)
    for path in stops(Path(whole["run_directory"]) / "checkpoints"):
        resumed = run(*SAVING, *TRAINING[name], f"ckpt_path={path}", world_size=world_size)
        assert resumed["weights_sha256"] == whole["weights_sha256"], path.name
        for number in ("global_step", "epoch", "samples_seen"):
            assert resumed[number] == whole[number]
        assert resumed["metrics"]["val/loss"] == whole["metrics"]["val/loss"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_stopped_run_goes_on_in_its_directory(world_size: int, run: Run, tmp_path: Path) -> None:
    overrides = ["data.num_samples=61", "model._target_=own_parts.Dropout", "optimizer=adamw", "trainer.max_epochs=3"]
    whole = run(*overrides, world_size=world_size)
    folder = tmp_path / "stopped"
    first = run(*overrides, "trainer.max_steps=3", "ckpt_path=auto", directory=folder, world_size=world_size)
    assert first["global_step"] == 3
    second = run(*overrides, "ckpt_path=auto", directory=folder, world_size=world_size)
    assert second["weights_sha256"] == whole["weights_sha256"]
    assert second["samples_seen"] == whole["samples_seen"] == 3 * 61
    nothing_left = run(*overrides, "ckpt_path=auto", directory=folder, world_size=world_size)
    assert nothing_left["weights_sha256"] == whole["weights_sha256"]
    assert nothing_left["global_step"] == whole["global_step"]


def test_early_stopping_goes_on_counting(run: Run, tmp_path: Path) -> None:
    stopping = ["callbacks=early_stopping", "callbacks.early_stopping.patience=4", "optimizer.lr=0"]
    overrides = [*stopping, "data.batch_size=16", "trainer.max_epochs=20"]
    assert run(*overrides)["epoch"] == 5
    folder = tmp_path / "stopped"
    run(*overrides, "trainer.max_epochs=3", directory=folder)
    assert run(*overrides, "ckpt_path=auto", directory=folder)["epoch"] == 5


def test_another_directory_can_be_named(run: Run) -> None:
    first = run("trainer.max_epochs=1")
    folder, checkpoints = Path(first["run_directory"]), Path(first["run_directory"]) / "checkpoints"
    expected = run()["weights_sha256"]
    for name in (folder, checkpoints, checkpoints / "last.pt", checkpoints / "best.pt"):
        assert run(f"ckpt_path={name}")["weights_sha256"] == expected


def test_what_does_not_go_on_is_refused_and_nothing_is_written(run: Run, tmp_path: Path) -> None:
    first = run("trainer.max_epochs=1", world_size=2)
    path, folder = first["last_checkpoint"], tmp_path / "refused"

    def refused(*overrides: str, directory: Path = folder, world_size: int = 1) -> str:
        with pytest.raises(RequestError) as refusal:
            run(*overrides, directory=directory, world_size=world_size)
        return str(refusal.value)

    assert "was trained with a global batch of 16 samples, this run has 8" in refused(f"ckpt_path={path}")
    other = refused(f"ckpt_path={path}", "model.hidden_features=12", world_size=2)
    assert "is a checkpoint of another model" in other
    assert "net1.weight: [10, 10] in the checkpoint, [12, 10] in the model" in other
    assert "there is no" in refused("ckpt_path=nowhere.pt")
    assert "has no checkpoint" in refused("ckpt_path=last")
    assert not folder.exists()
    used = Path(first["run_directory"])
    before = {file: file.stat().st_mtime_ns for file in used.rglob("*")}
    assert "already holds a run" in refused(directory=used, world_size=2)
    assert {file: file.stat().st_mtime_ns for file in used.rglob("*")} == before
    assert run(f"ckpt_path={path}", "data.global_batch_size=16")["global_step"] == 8


def test_a_damaged_checkpoint_is_refused(run: Run, tmp_path: Path) -> None:
    path = Path(run()["last_checkpoint"])
    content = bytearray(path.read_bytes())
    copy = tmp_path / "copy.pt"
    copy.write_bytes(content[: len(content) // 2])
    with pytest.raises(RequestError, match=r"copy\.pt cannot be read as a checkpoint"):
        run(f"ckpt_path={copy}")


def test_checkpoints_hold_plain_data(run: Run) -> None:
    state: dict[str, Any] = load(Path(run(world_size=2)["last_checkpoint"]))
    assert set(state["model"]) == {"net1.weight", "net1.bias", "net2.weight", "net2.bias"}, "names without wrappers"
    assert state["cursor"] == {"epoch": 2, "batch": 0, "step": 8, "samples_seen": 128}
    assert (state["world_size"], state["global_batch_size"], state["seed"]) == (2, 16, 42)
