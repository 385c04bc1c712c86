"""Checkpoints: complete or absent, verified when read, pruned as asked for."""

import os
import pickle
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch

from ddp_recipes.checkpoint import FORMAT, FileCheckpointer, check_weights, find, load, newest, write, write_aside
from ddp_recipes.digest import digest
from ddp_recipes.errors import RecipeError, RequestError
from ddp_recipes.models import Toy
from ddp_recipes.settings import CheckpointSettings


def state_of(step: int, size: int = 4) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    return {
        "model": {"weight": torch.randn(size, 3, generator=generator), "half": torch.ones(3, dtype=torch.bfloat16)},
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]},
        "cursor": {"epoch": 0, "batch": step, "step": step, "samples_seen": 8 * step},
        "metrics": {"val/loss": 0.5},
        "nothing": None,
    }


def checkpointer(folder: Path, **changes: Any) -> FileCheckpointer:
    settings: dict[str, Any] = {
        "enabled": True,
        "every_n_steps": None,
        "every_n_epochs": None,
        "monitor": "val/loss",
        "mode": "min",
        "save_top_k": 1,
        "save_last": True,
        "async_save": False,
    }
    return FileCheckpointer(folder, CheckpointSettings(**settings | changes))


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("step_")) for path in folder.glob("step_*.pt"))


# --- one file --------------------------------------------------------------------------------------------------------


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "checkpoints" / "step_00000003.pt"
    write(path, state_of(3))
    state = load(path)
    assert state.pop("format") == FORMAT
    assert digest(state) == digest(state_of(3))
    assert state["optimizer"]["param_groups"] == [{"lr": 0.1, "betas": (0.9, 0.99)}]
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_writing_again_replaces(tmp_path: Path) -> None:
    path = tmp_path / "step_00000003.pt"
    write(path, state_of(3))
    write(path, state_of(4))
    assert digest(load(path)["model"]) == digest(state_of(4)["model"])


def _half(file: BinaryIO) -> None:
    file.write(b"half")
    raise ZeroDivisionError


def test_what_cannot_be_written_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "step_00000003.pt"
    write(path, state_of(3))
    before = path.read_bytes()
    with pytest.raises(TypeError, match="object cannot be in a checkpoint"):
        write(path, {**state_of(3), "anything": object()})
    with pytest.raises(ZeroDivisionError):
        write_aside(path, _half)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_one_flipped_byte_is_found(tmp_path: Path) -> None:
    path = tmp_path / "step_00000003.pt"
    write(path, state_of(3))
    good = path.read_bytes()
    weights = state_of(3)["model"]["weight"].numpy().tobytes()
    for place in (good.index(weights), good.index(weights) + len(weights) - 1):
        path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        with pytest.raises(RequestError, match=r"damaged"):
            load(path)
    path.write_bytes(good)
    load(path)


def test_a_change_that_the_file_format_does_not_notice_is_found(tmp_path: Path) -> None:
    path = tmp_path / "step_00000003.pt"
    write(path, state_of(3))
    state = torch.load(path, weights_only=True)
    state["cursor"]["step"] = 4
    torch.save(state, path)
    with pytest.raises(RequestError, match=r"step_00000003\.pt is damaged: its content does not match its digest"):
        load(path)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_a_truncated_file_is_refused(share: float, tmp_path: Path) -> None:
    path = tmp_path / "step_00000003.pt"
    write(path, state_of(3, size=1000))
    write(tmp_path / "step_00000002.pt", state_of(2))
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(RequestError, match=r"cannot be read as a checkpoint.*there are: step_00000002\.pt"):
        load(path)


class Hostile:
    """Makes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (self.file, "it ran")


def test_nothing_in_a_checkpoint_runs(tmp_path: Path) -> None:
    proof, path = tmp_path / "proof", tmp_path / "step_00000001.pt"
    pickle.loads(pickle.dumps(Hostile(proof)))
    assert proof.read_text() == "it ran", "otherwise this test shows nothing"
    proof.unlink()
    content = {"format": FORMAT, "digest": "0", "model": Hostile(proof)}
    torch.save(content, path)
    with pytest.raises(RequestError, match="holds more than tensors and plain data"):
        load(path)
    path.write_bytes(pickle.dumps(content))
    with pytest.raises(RequestError, match="holds more than tensors and plain data"):
        load(path)
    assert not proof.exists()


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "step_00000001.pt"
    with pytest.raises(RequestError, match=r"There is no checkpoint .*No complete checkpoint is in"):
        load(path)
    path.write_text("not a checkpoint")
    with pytest.raises(RequestError, match="cannot be read as a checkpoint"):
        load(path)
    torch.save(Toy().state_dict(), path)
    with pytest.raises(RequestError, match="is no checkpoint of ddp_recipes: it has no format and digest"):
        load(path)
    torch.save({"format": FORMAT + 1, "digest": ""}, path)
    with pytest.raises(RequestError, match=f"has format {FORMAT + 1}, this version reads up to {FORMAT}"):
        load(path)


def test_weights_of_another_model_are_refused_by_name_and_shape() -> None:
    expected = Toy(in_features=10).state_dict()
    check_weights(Path("a.pt"), expected, expected)
    other = Toy(in_features=64).state_dict()
    other["extra.bias"] = other.pop("net2.bias")
    with pytest.raises(RequestError) as refusal:
        check_weights(Path("a.pt"), other, expected)
    assert str(refusal.value).splitlines() == [
        "a.pt is a checkpoint of another model:",
        "  net2.bias: not in the checkpoint",
        "  extra.bias: not in the model",
        "  net1.weight: [10, 64] in the checkpoint, [10, 10] in the model",
        "Compose the model it was saved from (config.yaml in its run directory), or choose another ckpt_path.",
    ]


def test_a_long_list_of_differences_is_cut() -> None:
    expected = {f"layer{number}": torch.zeros(1) for number in range(20)}
    with pytest.raises(RequestError, match="and 12 more"):
        check_weights(Path("a.pt"), {}, expected)


# --- several files ---------------------------------------------------------------------------------------------------

VALUES = [0.5, 0.3, 0.4, float("nan"), 0.3, 0.9]  # at the steps 1 to 6


@pytest.mark.parametrize(
    ("changes", "kept", "best"),
    [
        ({}, [2, 6], 2),
        ({"save_top_k": 2}, [2, 5, 6], 2),
        ({"save_top_k": 3}, [2, 3, 5, 6], 2),
        ({"save_top_k": 0}, [6], None),
        ({"save_top_k": -1}, [1, 2, 3, 4, 5, 6], 2),
        ({"mode": "max"}, [6], 6),
        ({"mode": "max", "save_top_k": 2}, [1, 6], 6),
        ({"save_last": False}, [2], 2),
        ({"save_last": False, "save_top_k": 2}, [2, 5], 2),
        ({"save_last": False, "save_top_k": -1}, [1, 2, 3, 4, 5, 6], 2),
    ],
    ids=str,
)
def test_the_best_k_and_the_last_are_kept(
    changes: dict[str, Any], kept: list[int], best: int | None, tmp_path: Path
) -> None:
    keeper = checkpointer(tmp_path, **changes)
    for step, value in enumerate(VALUES, 1):
        keeper.save(state_of(step), step, value)
        assert newest(tmp_path) is not None
    assert steps_in(tmp_path) == kept
    last, best_link = tmp_path / "last.pt", tmp_path / "best.pt"
    assert keeper.last == (last if last.exists() else None)
    assert keeper.best == (best_link if best_link.exists() else None)
    assert last.exists() == changes.get("save_last", True)
    if last.exists():
        assert last.samefile(tmp_path / "step_00000006.pt")
        assert load(last)["cursor"]["step"] == 6
    assert best_link.exists() == (best is not None)
    if best is not None:
        assert best_link.samefile(tmp_path / f"step_{best:08d}.pt")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_without_a_measure_the_last_is_kept(tmp_path: Path) -> None:
    for save_last in (True, False):
        keeper = checkpointer(tmp_path, save_last=save_last)
        for step in (1, 2, 3):
            keeper.save(state_of(step), step, None)
        assert steps_in(tmp_path) == [3]
        assert keeper.best is None


def test_the_best_of_an_earlier_start_is_remembered(tmp_path: Path) -> None:
    first = checkpointer(tmp_path, save_top_k=2)
    for step, value in enumerate([0.1, 0.5, 0.4], 1):
        first.save(state_of(step), step, value)
    second = checkpointer(tmp_path, save_top_k=2)
    second.load_state(load(tmp_path / "last.pt")["checkpointer"])
    assert second.best == tmp_path / "best.pt"
    second.save(state_of(4), 4, 0.3)
    assert steps_in(tmp_path) == [1, 4]
    assert (tmp_path / "best.pt").samefile(tmp_path / "step_00000001.pt")


def test_values_of_files_that_are_gone_are_forgotten(tmp_path: Path) -> None:
    first = checkpointer(tmp_path / "a", save_top_k=1)
    first.save(state_of(1), 1, 0.1)
    elsewhere = checkpointer(tmp_path / "b", save_top_k=1)
    elsewhere.load_state(first.state())
    elsewhere.save(state_of(2), 2, 0.9)
    assert (tmp_path / "b" / "best.pt").samefile(tmp_path / "b" / "step_00000002.pt")


# --- found by ckpt_path ----------------------------------------------------------------------------------------------


def test_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = tmp_path / "fresh"
    assert find(None, fresh) is None
    assert find("auto", fresh) is None
    for name in ("last", "best"):
        with pytest.raises(RequestError, match=f"ckpt_path={name}"):
            find(name, fresh)

    keeper = checkpointer(tmp_path / "run" / "checkpoints")
    for step, value in enumerate([0.1, 0.5, 0.4], 1):
        keeper.save(state_of(step), step, value)
    folder = tmp_path / "run" / "checkpoints"
    newest_file = folder / "step_00000003.pt"
    assert find("auto", tmp_path / "run") == find("last", tmp_path / "run") == newest_file
    assert find("best", tmp_path / "run") == folder / "best.pt"
    assert find(str(tmp_path / "run"), fresh) == find(str(folder), fresh) == newest_file
    assert find(str(folder / "best.pt"), fresh) == folder / "best.pt"
    monkeypatch.chdir(tmp_path)
    assert find("run", fresh) == newest_file

    with pytest.raises(
        RequestError, match=r"ckpt_path=nothing\.pt: there is no .*Allowed: last, best, auto, a checkpoint"
    ):
        find("nothing.pt", fresh)
    fresh.mkdir()
    with pytest.raises(RequestError, match="is a folder without a checkpoint"):
        find(str(fresh), fresh)


def test_last_is_found_by_what_is_there(tmp_path: Path) -> None:
    """Not by a link, which may be of the step before if the run was killed between the two."""
    for step in (9, 10, 100_000_000):
        write(tmp_path / f"step_{step:08d}.pt", state_of(step))
    (tmp_path / ".step_99999999999.pt.part").write_text("half")
    (tmp_path / "step_x.pt").write_text("somebody else's")
    assert newest(tmp_path) == tmp_path / "step_100000000.pt"


# --- a full disk -----------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a small disk takes root's rights")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_named_and_harms_nothing(small_disk: Path) -> None:
    path = small_disk / "checkpoints" / "step_00000002.pt"
    write(path.with_name("step_00000001.pt"), state_of(1, size=8_000))
    with pytest.raises(RecipeError) as failure:
        write(path, state_of(2, size=80_000))
    assert failure.value.exit_status == 1
    message = str(failure.value)
    assert f"The checkpoint {path} could not be written: No space left on device." in message
    assert "It needs about 960," in message
    assert "Earlier checkpoints are untouched." in message
    assert [entry.name for entry in path.parent.iterdir()] == ["step_00000001.pt"]
    assert load(path.with_name("step_00000001.pt"))["cursor"]["step"] == 1


# --- saved while training goes on ------------------------------------------------------------------------------------


def test_async_save_writes_the_state_as_it_was_when_asked(tmp_path: Path) -> None:
    saver = checkpointer(tmp_path, async_save=True)
    state = state_of(3)
    expected = digest(state)
    saver.save(state, 3, 0.5)
    for tensor in state["model"].values():
        tensor.zero_()  # training goes on
    saver.wait()
    written = load(tmp_path / "last.pt")
    assert digest({name: written[name] for name in state}) == expected
    assert (saver.last, saver.best) == (tmp_path / "last.pt", tmp_path / "best.pt")


def test_async_saves_leave_what_others_leave(tmp_path: Path) -> None:
    for folder, wanted in ((tmp_path / "async", True), (tmp_path / "plain", False)):
        saver = checkpointer(folder, async_save=wanted)
        for step, value in ((1, 0.5), (2, 0.3), (3, 0.4)):
            saver.save(state_of(step), step, value)
        saver.wait()
    assert steps_in(tmp_path / "async") == steps_in(tmp_path / "plain") == [2, 3]


def test_a_failed_async_save_raises_at_the_next_one(tmp_path: Path) -> None:
    saver = checkpointer(tmp_path / "checkpoints", async_save=True)
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    saver.save(state_of(1), 1, 0.5)
    with pytest.raises(RecipeError, match="could not be written"):
        saver.save(state_of(2), 2, 0.5)
