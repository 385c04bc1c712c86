"""``mode=export`` and ``ddp_recipes.export``: the weights alone, under the model's own names."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ddp_recipes
from ddp_recipes.checkpointing.reading import load
from ddp_recipes.errors import RequestError
from ddp_recipes.models import Toy
from ddp_recipes.reporting.run_directory import Summary
from ddp_recipes.runtime.tensors import digest

Run = Callable[..., Summary]


@pytest.fixture
def trained(run: Run) -> Path:
    return Path(run(world_size=2)["run_directory"])


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_weights_of_a_checkpoint_are_written_under_the_names_of_the_bare_model(
    world_size: int, trained: Path, run: Run
) -> None:
    summary = run("mode=export", f"ckpt_path={trained}", world_size=world_size)
    file = Path(summary["run_directory"]) / "model.safetensors"
    model = Toy()
    model.load_state_dict(load_file(file))
    expected = load(trained / "checkpoints" / "last.pt")
    torch.testing.assert_close(dict(model.state_dict()), expected["model"], rtol=0, atol=0)
    assert summary["weights_sha256"] == digest(expected["model"])
    assert summary["status"] == "finished"
    assert not (file.parent / "checkpoints").exists()


def test_python_writes_the_same(trained: Path, run: Run, tmp_path: Path) -> None:
    by_mode = Path(run("mode=export", f"ckpt_path={trained}")["run_directory"]) / "model.safetensors"
    for source in (trained, str(trained / "checkpoints" / "last.pt")):
        written = ddp_recipes.export(source, tmp_path / "deep" / "weights.safetensors")
        assert written.read_bytes() == by_mode.read_bytes()
    assert [path.name for path in written.parent.iterdir()] == ["weights.safetensors"]


def test_a_weight_of_two_names_is_under_both(run: Run) -> None:
    tied = ["model._target_=own_parts.Tied", "data.out_features=10"]
    trained = run(*tied)["run_directory"]
    file = ddp_recipes.export(trained, Path(trained) / "model.safetensors")
    weights = load_file(file)
    assert set(weights) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    torch.testing.assert_close(weights["0.weight"], weights["2.weight"], rtol=0, atol=0)


def test_what_the_task_holds_is_left_out(run: Run) -> None:
    weighted = "task.loss={_target_: own_parts.Weighted}"
    trained = Path(run(weighted)["run_directory"])
    assert "task.loss.weight" in load(trained / "checkpoints" / "last.pt")["model"]
    assert set(load_file(ddp_recipes.export(trained, trained / "model.safetensors"))) == set(Toy().state_dict())


def test_what_a_module_saves_beside_tensors_comes_from_a_run_and_is_in_no_safetensors(run: Run) -> None:
    saves = ["model._target_=own_parts.SavedAnnealed"]
    trained = run(*saves)
    again = run(*saves, "mode=validate", f"weights_from={trained['run_directory']}")
    assert again["metrics"]["val/loss"] == trained["metrics"]["val/loss"]
    exported = Path(run(*saves, "mode=export", f"ckpt_path={trained['run_directory']}")["run_directory"])
    assert "safetensors hold tensors alone, and so not _extra_state." in (exported / "train.log").read_text()
    assert {*load_file(exported / "model.safetensors")} == {*Toy().state_dict()}


def test_what_cannot_be_exported_is_refused(trained: Path, run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "refused"
    for overrides, message in (
        ([], "mode=export needs ckpt_path"),
        (["ckpt_path=auto"], "mode=export: .* has no checkpoint"),
        (["ckpt_path=nowhere.pt"], "there is no"),
        ([f"ckpt_path={trained}", "model.hidden_features=7"], "is a checkpoint of another model"),
    ):
        with pytest.raises(RequestError, match=message):
            run("mode=export", *overrides, directory=folder)
    with pytest.raises(RequestError, match="already holds a run"):
        run("mode=export", f"ckpt_path={trained / 'checkpoints' / 'last.pt'}", directory=trained)
    path = trained / "checkpoints" / "last.pt"
    (tmp_path / "half.pt").write_bytes(path.read_bytes()[:500])
    with pytest.raises(RequestError, match="damaged"):
        ddp_recipes.export(tmp_path / "half.pt", folder / "model.safetensors")
    assert not folder.exists()
