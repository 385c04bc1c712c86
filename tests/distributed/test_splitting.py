"""Runs with several devices a replica: the same weights at any number of them, checkpoints that move between them."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ddp_recipes.errors import RequestError
from ddp_recipes.reporting.run_directory import Summary
from helpers.marks import slow_but

Run = Callable[..., Summary]
Weights = Callable[[Summary], dict[str, Any]]

OWN = "model._target_=own_blocks.Steps"
MODELS = {"mlp": ["model=mlp"], "own": [OWN, "~model.hidden_features"]}
OVER = {1: [], 2: ["model.num_devices=2", "model.split=auto"], 3: ["model.num_devices=3"]}


@pytest.mark.parametrize(
    ("model", "strategy", "world_size"),
    slow_but(
        [("own", "single", 1)],
        [("mlp", "single", 1), ("own", "single", 1), ("own", "ddp", 2), ("own", "ddp_exact", 2)],
    ),
)
def test_weights_are_the_same_over_any_number_of_devices(strategy: str, world_size: int, model: str, run: Run) -> None:
    ks = (1, 2, 3) if strategy == "single" else (1, 2)
    runs = [run(f"strategy={strategy}", *MODELS[model], *OVER[k], world_size=world_size) for k in ks]
    assert [summary["devices_per_replica"] for summary in runs] == list(ks)
    assert len({summary["weights_sha256"] for summary in runs}) == 1


@pytest.mark.slow
def test_checkpoints_move_between_numbers_of_devices(run: Run, tmp_path: Path) -> None:
    whole = run("model=mlp", "trainer.max_epochs=3", "strategy=single")
    folder = tmp_path / "moved"
    for epochs, k in enumerate((1, 3, 2), start=1):
        last = run(
            "model=mlp", f"trainer.max_epochs={epochs}", "strategy=single", "ckpt_path=auto", *OVER[k], directory=folder
        )
    assert last["global_step"] == whole["global_step"]
    assert last["weights_sha256"] == whole["weights_sha256"]


@pytest.mark.slow
def test_evaluation_and_prediction_run_on_a_split_model(run: Run, tmp_path: Path) -> None:
    trained = run("model=mlp", "strategy=single")
    start = ["model=mlp", "strategy=single", *OVER[2], f"ckpt_path={trained['last_checkpoint']}"]
    measured = run(*start, "mode=validate")
    assert measured["metrics"]["val/loss"] == pytest.approx(trained["metrics"]["val/loss"], rel=1e-6)
    run(*start, "mode=predict", directory=tmp_path / "predicted")
    assert torch.load(tmp_path / "predicted" / "predictions.pt", weights_only=True).shape == (21, 5)


MICRO_BATCHES = [("mlp", 1, 1), ("mlp", 2, 2), ("own", 3, 1), ("own", 2, 2)]


@pytest.mark.parametrize(("model", "k", "world_size"), slow_but(MICRO_BATCHES[1:2], MICRO_BATCHES))
def test_micro_batches_leave_the_result(model: str, k: int, world_size: int, run: Run, weights: Weights) -> None:
    """A batch of 5 of each rank is cut in parts of 2, 2 and 1, the last one of 4 in parts of 2, 1 and 1."""
    overrides = [*MODELS[model], "data.batch_size=5"]
    whole = run(*overrides, world_size=world_size)
    parted = run(*overrides, *OVER[k], "model.micro_batches=3", world_size=world_size)
    torch.testing.assert_close(weights(parted), weights(whole), rtol=0, atol=1e-6)


def test_a_model_that_places_itself_takes_micro_batches(run: Run, weights: Weights) -> None:
    whole, parted = run("model=toy"), run("model=toy_mp", "model.micro_batches=2")
    torch.testing.assert_close(weights(parted), weights(whole), rtol=0, atol=1e-6)


UNEVEN = ["model._target_=own_blocks.Uneven", "~model.hidden_features"]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", slow_but([2], [1, 2]))
def test_a_timed_split_leaves_the_weights(world_size: int, run: Run) -> None:
    """Rank 0 times, and all ranks cut there; weights, batch order and random numbers are what they would have been."""
    whole = run(*UNEVEN, world_size=world_size)
    over_two = [*UNEVEN, "model.num_devices=2"]
    counted, timed = (run(*over_two, f"model.split={how}", world_size=world_size) for how in ("auto", "timed"))
    assert counted["split"] == ["2"]
    assert len(timed["split"]) == 1  # where, is for benchmarks/splitting.py --times: others may be on the machine
    assert whole["weights_sha256"] == counted["weights_sha256"] == timed["weights_sha256"]


@pytest.mark.slow
def test_a_timed_split_makes_stages_in_processes_of_their_own(run: Run) -> None:
    timed = run(*UNEVEN, "strategy=ddp_pipeline", "model.split=timed", world_size=2)
    assert len(timed["split"]) == 1


@pytest.mark.slow
def test_dry_run_times_nothing(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    run(*UNEVEN, "model.num_devices=2", "model.split=timed", "plan=true")
    assert "model.split=timed: in a dry run there is no device to time on, so stages are even as with auto." in "".join(
        capfd.readouterr()
    )


TWO = "model.num_devices=2"
REFUSED = {
    "a name that is not there": (
        ["model=mlp", TWO, "model.split=[layers.9]"],
        ["MLP has no layers.9.", "0, 1, 2, 3, 4"],
    ),
    "too many devices": (["model.num_devices=3"], ["model.num_devices=3", "Toy can be cut into 2 stage(s) at most"]),
    "too many names": (["model.split=[net2]"], ["model.split=[net2] makes 2 stages", "set model.num_devices=2"]),
    "too few names": (["model.num_devices=3", "model.split=[net2]"], ["give 2 name(s)"]),
    "no list": (
        [TWO, "model.split=net2"],
        ["model.split=net2 is not allowed. Allowed: auto, timed, or a list of names"],
    ),
    "a model that places itself": (["model=toy_mp", "model.split=auto"], ["model.split=auto", "places itself"]),
    "no micro-batch": (["model.micro_batches=0"], ["model.micro_batches=0 is not allowed", "number from 1 to 65536"]),
    "statistics of all ranks": (
        ["model.micro_batches=2", "strategy.sync_batchnorm=true"],
        ["model.micro_batches=2 and strategy.sync_batchnorm=true", "Leave out one"],
    ),
    "a sum over a cut": (
        ["model._target_=own_blocks.Around", "~model.hidden_features", TWO, "model.split=[blocks.1]"],
        ["aten.add.Tensor in the forward of the model mixes tensors of stage 0 and stage 1", "begin at blocks.1"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_on_all_ranks(case: str, run: Run, tmp_path: Path) -> None:
    overrides, parts = REFUSED[case]
    folder = tmp_path / "refused"
    with pytest.raises(RequestError) as refusal:
        run(*overrides, world_size=2, directory=folder)
    for part in parts:
        assert part in str(refusal.value)
    assert not folder.exists() or not any(folder.iterdir())


# --- the picture -----------------------------------------------------------------------------------------------------


def pictures(folder: Path) -> list[str]:
    """Return the tags of the pictures in a run's TensorBoard."""
    found = EventAccumulator(str(folder / "tensorboard"), {"images": 0})
    found.Reload()
    tags: list[str] = found.Tags()["images"]
    return tags


@pytest.mark.slow
def test_a_split_leaves_a_picture(run: Run) -> None:
    pytest.importorskip("matplotlib")
    split = ["model=mlp", "model.num_devices=2", "logger=tensorboard", "trainer.max_steps=1"]
    folder = Path(run(*split, world_size=2)["run_directory"])
    assert (folder / "split.png").read_bytes().startswith(b"\x89PNG")
    assert pictures(folder) == ["split"]
    for other in (["trainer.fast_dev_run=true"], ["model.num_devices=1"]):
        assert not (Path(run(*split, *other)["run_directory"]) / "split.png").exists()


def test_without_matplotlib_a_line_says_why_there_is_no_picture(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    folder = Path(run("model=mlp", "model.num_devices=2", "trainer.max_steps=1")["run_directory"])
    assert not (folder / "split.png").exists()
    assert "There is no split.png: it takes matplotlib." in (folder / "train.log").read_text()
