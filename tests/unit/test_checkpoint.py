"""A checkpoint file is complete or absent, verified when read, and found by what is there."""

import json
import os
import pickle
import shutil
import zipfile
from collections import OrderedDict, defaultdict
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings, strategies as st

from ddp_recipes.checkpointing.files import FORMAT, find, newest_first
from ddp_recipes.checkpointing.parts import taken_apart
from ddp_recipes.checkpointing.reading import DamagedCheckpoint, check_weights, load, load_first
from ddp_recipes.errors import RequestError
from ddp_recipes.models import Toy
from ddp_recipes.runtime.files import write_aside
from ddp_recipes.runtime.tensors import digest
from helpers.checkpoints import checkpointer, plain, state_of, write
from helpers.states import nested, same, states

# --- one file --------------------------------------------------------------------------------------------------------


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "checkpoints" / "step_00000003.pt"
    write(path, state_of(3))
    state = load(path)
    assert state["format"] == FORMAT
    assert digest(plain(state)) == digest(state_of(3))
    assert state["optimizer"]["param_groups"] == [{"lr": 0.1, "betas": (0.9, 0.99)}]
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for all examples of a property."""
    return tmp_path_factory.mktemp("checkpoints")


@given(states())
def test_any_state_is_read_as_it_was_to_the_bit(folder: Path, state: dict[str, Any]) -> None:
    write(folder / "step_00000001.pt", state)
    assert same(plain(load(folder / "step_00000001.pt")), state)


class Kind(StrEnum):
    BEST = "best"


class Pair(NamedTuple):
    first: int
    second: float


def test_numbers_texts_and_containers_of_other_kinds_are_saved_as_plain_ones(tmp_path: Path) -> None:
    """As they are they could be written, and not be read without running code."""
    state = {
        "numbers": [np.float64(0.1), np.float32(0.5), np.int64(3), np.bool_(True), IntEnum("Level", {"HIGH": 4}).HIGH],
        "texts": {np.str_("a"): Kind.BEST},
        "pair": Pair(1, np.float64(2.0)),
        "counts": defaultdict(int, a=1),
        "state": OrderedDict(weight=torch.ones(2)),
    }
    expected = {
        "numbers": [0.1, 0.5, 3, True, 4],
        "texts": {"a": "best"},
        "pair": (1, 2.0),
        "counts": {"a": 1},
        "state": {"weight": torch.ones(2)},
    }
    write(tmp_path / "step_00000001.pt", state)
    found = torch.load(tmp_path / "step_00000001.pt", weights_only=True)
    assert same({key: found[key] for key in state}, expected)
    assert json.dumps(taken_apart(state)[0]) == json.dumps(taken_apart(expected)[0]), "in parts, and in memory"


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
    with pytest.raises(TypeError, match="anything: object cannot be in a checkpoint"):
        write(path, {**state_of(3), "anything": object()})
    with pytest.raises(ZeroDivisionError):
        write_aside(path, _half)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.fixture(scope="module")
def good(folder: Path) -> tuple[Path, bytes, range]:
    """A small checkpoint: its path, what is in it, and where its only weight is."""
    path, weight = folder / "step_00000003.pt", torch.randn(5, generator=torch.Generator().manual_seed(3))
    write(path, {"model": {"weight": weight}, "cursor": {"step": 3}})
    write(folder / "step_00000002.pt", state_of(2))
    content = path.read_bytes()
    first = content.index(weight.numpy().tobytes())
    return path, content, range(first, first + weight.nbytes)


@settings(max_examples=120)
@given(st.data(), st.integers(1, 255))
def test_whatever_byte_is_changed_is_found_or_harms_nothing(
    good: tuple[Path, bytes, range], data: st.DataObject, bits: int
) -> None:
    """Some bytes of a zip file mean nothing; whichever do are watched over by its checksums."""
    path, content, weight = good
    place = data.draw(st.sampled_from(range(len(content))) | st.sampled_from(weight))
    path.write_bytes(content)
    expected = load(path)
    path.write_bytes(content[:place] + bytes([content[place] ^ bits]) + content[place + 1 :])
    with suppress(DamagedCheckpoint):
        assert same(plain(load(path)), plain(expected))
        assert place not in weight


def test_a_flipped_byte_that_torch_reads_over_is_found(tmp_path: Path) -> None:
    path = tmp_path / "step_00000003.pt"
    write(path, state_of(3))
    content, weight = bytearray(path.read_bytes()), state_of(3)["model"]["weight"].numpy().tobytes()
    content[content.index(weight)] ^= 1
    path.write_bytes(content)
    torch.load(path, weights_only=True)
    with pytest.raises(
        DamagedCheckpoint,
        match=r"step_00000003\.pt is damaged .*its content does not match its checksum \(archive/data/0\)",
    ):
        load(path)


def test_any_program_can_verify_a_checkpoint(tmp_path: Path) -> None:
    for folder, wanted in (("plain", False), ("async", True)):
        saver = checkpointer(tmp_path / folder, async_save=wanted)
        saver.save(state_of(3), 3, None)
        saver.wait(None)
        with zipfile.ZipFile(tmp_path / folder / "last.pt") as archive:
            assert archive.testzip() is None


def test_a_checkpoint_of_the_first_format_is_read(tmp_path: Path) -> None:
    torch.save({"format": 1, **state_of(3), "digest": "0" * 64}, tmp_path / "step_00000003.pt")
    assert load(tmp_path / "step_00000003.pt")["cursor"]["step"] == 3


@given(st.data())
def test_a_file_that_was_cut_short_anywhere_is_refused(good: tuple[Path, bytes, range], data: st.DataObject) -> None:
    path, content, _ = good
    path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    with pytest.raises(DamagedCheckpoint, match=r"step_00000003.pt is damaged .*there are: .*step_00000002\.pt"):
        load(path)


@dataclass
class Calls:
    """Calls something when it is unpickled."""

    function: Any
    arguments: tuple[Any, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.arguments


@dataclass
class Sets:
    """Does something when its state is set."""

    file: Path

    def __setstate__(self, state: dict[str, Path]) -> None:
        state["file"].touch()


class Mapped(dict[str, Any]):
    """A dict that is built by a call."""

    def __reduce__(self) -> Any:
        return Path.touch, (self["file"],)


def hostile(folder: Path, proof: Path) -> dict[str, Any]:
    """Return objects of several kinds that make the file ``proof`` when they are unpickled."""
    another = folder / "another.pt"
    torch.save(Calls(Path.touch, (proof,)), another)
    return {
        "os.system": Calls(os.system, (f"touch {proof}",)),
        "eval": Calls(eval, (f"open({str(proof)!r}, 'w').close()",)),
        "exec": Calls(exec, (f"open({str(proof)!r}, 'w').close()",)),
        "a method": Calls(Path.touch, (proof,)),
        "torch.load of another file": Calls(partial(torch.load, weights_only=False), (another,)),
        "__setstate__": Sets(proof),
        "an array of objects": np.array([Calls(Path.touch, (proof,))], dtype=object),
        "a subclass of dict": Mapped(file=proof),
    }


def test_nothing_in_a_checkpoint_runs(tmp_path: Path) -> None:
    proof, path = tmp_path / "proof", tmp_path / "step_00000001.pt"
    for kind, bad in hostile(tmp_path, proof).items():
        pickle.loads(pickle.dumps(bad))
        assert proof.exists(), f"otherwise this shows nothing of {kind}"
        proof.unlink()
        content = {"format": FORMAT, "model": {"weight": torch.ones(1), "bad": bad}}
        for save in (
            torch.save,
            partial(torch.save, _use_new_zipfile_serialization=False),
            lambda content, path: path.write_bytes(pickle.dumps(content)),
        ):
            save(content, path)
            with pytest.raises(DamagedCheckpoint, match="holds more than tensors and plain data") as refusal:
                load(path)
            assert "weights_only" not in str(refusal.value), "torch's advice on how to load it all the same"
        assert not proof.exists(), kind


def test_an_archive_writes_nowhere(tmp_path: Path) -> None:
    path = tmp_path / "inside" / "step_00000001.pt"
    write(path, state_of(1))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("../../proof", "it was written")
    with suppress(DamagedCheckpoint):
        load(path)
    assert [inside.name for inside in tmp_path.iterdir()] == ["inside"]


@given(st.binary(max_size=60))
@example(pickle.dumps(None))
@example(pickle.dumps([1]))
@example(b"PK\3\4" + bytes(200))
@example(b"\x80\x02" + b"(" * 10_000)
def test_any_other_file_is_refused(folder: Path, content: bytes) -> None:
    path = folder / "step_00000004.pt"
    path.write_bytes(content)
    with pytest.raises(DamagedCheckpoint, match=r"step_00000004\.pt is damaged or no checkpoint"):
        load(path)


@given(nested(2))
@example(Toy().state_dict())
@example({"model": {}})
@example({"format": "1", "model": {}})
@example({"format": FORMAT, "model": {1, 2}})
def test_what_torch_reads_but_we_did_not_write_is_refused(folder: Path, state: Any) -> None:
    torch.save(state, folder / "step_00000004.pt")
    with pytest.raises(DamagedCheckpoint, match=r"it has not the format|it has no weights"):
        load(folder / "step_00000004.pt")


def test_weights_alone_are_refused_with_the_key_that_takes_them(tmp_path: Path) -> None:
    torch.save(Toy(4, 3).state_dict(), tmp_path / "weights.pt")
    with pytest.raises(DamagedCheckpoint, match="weights alone, of any program, are given as weights_from"):
        load(tmp_path / "weights.pt")


def test_no_file_and_a_newer_format_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "step_00000001.pt"
    with pytest.raises(RequestError, match=r"There is no checkpoint .*No complete checkpoint is in"):
        load(path)
    torch.save({"format": FORMAT + 1}, path)
    with pytest.raises(RequestError, match=f"has format {FORMAT + 1}, this version reads up to {FORMAT}"):
        load(path)
    write(tmp_path / "step_00000000.pt", state_of(0))
    with pytest.raises(RequestError, match="update ddp_recipes"):
        load_first(newest_first(tmp_path))  # a newer one is not damaged: nothing is lost by updating


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


# --- found by ckpt_path ----------------------------------------------------------------------------------------------


def test_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = tmp_path / "fresh"
    assert find(None, fresh) == []
    assert find("auto", fresh) == []
    for name in ("last", "best"):
        with pytest.raises(RequestError, match=f"ckpt_path={name}"):
            find(name, fresh)

    keeper = checkpointer(tmp_path / "run" / "checkpoints")
    for step, value in enumerate([0.1, 0.5, 0.4], 1):
        keeper.save(state_of(step), step, value)
    folder = tmp_path / "run" / "checkpoints"
    files = [folder / f"step_{step:08d}.pt" for step in (3, 2, 1)]
    assert find("auto", tmp_path / "run") == find("last", tmp_path / "run") == files
    assert find("best", tmp_path / "run") == [folder / "best.pt"]
    assert find(str(tmp_path / "run"), fresh) == find(str(folder), fresh) == files
    assert find(str(folder / "best.pt"), fresh) == [folder / "best.pt"]
    monkeypatch.chdir(tmp_path)
    assert find("run", fresh) == files

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
    assert [path.name for path in newest_first(tmp_path)] == [
        "step_100000000.pt",
        "step_00000010.pt",
        "step_00000009.pt",
    ]


def test_the_directory_of_a_sweep_is_refused_with_the_runs_in_it(tmp_path: Path) -> None:
    for job in ("0", "2"):
        write(tmp_path / "sweep" / job / "checkpoints" / "step_00000001.pt", state_of(1))
    (tmp_path / "sweep" / "1").mkdir()
    sweep = str(tmp_path / "sweep")
    with pytest.raises(RequestError, match=f"ckpt_path={sweep} holds several runs.*: {sweep}/0, {sweep}/2\\."):
        find(sweep, tmp_path)


def read(folder: Path) -> tuple[str, int, list[str]]:
    """Return the name of the file that a run goes on from, its step, and the warnings about others."""
    path, state, warnings = load_first(newest_first(folder))
    return path.name, state["cursor"]["step"], warnings


def damage(path: Path) -> None:
    """Cut a file in half where it is, so that other names of it are of the same half."""
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def test_a_damaged_newest_one_is_passed_over_for_the_one_before(tmp_path: Path) -> None:
    keeper = checkpointer(tmp_path)
    for step, value in enumerate([0.5, 0.4, 0.3, 0.2], 1):
        keeper.save(state_of(step), step, value)
    assert read(tmp_path) == ("step_00000004.pt", 4, [])
    damage(tmp_path / "step_00000004.pt")
    name, step, warnings = read(tmp_path)
    assert (name, step, len(warnings)) == ("step_00000003.pt", 3, 1)
    assert warnings[0].startswith(f"{tmp_path / 'step_00000004.pt'} is damaged: it cannot be read")
    assert warnings[0].endswith(f"{tmp_path / 'step_00000003.pt'} is used instead.")
    damage(tmp_path / "step_00000003.pt")
    with pytest.raises(RequestError) as refusal:
        load_first(newest_first(tmp_path))
    first, *rest = str(refusal.value).splitlines()
    assert first == f"Every checkpoint in {tmp_path} is damaged:"
    assert [line.split(":")[0].strip() for line in rest] == ["step_00000004.pt", "step_00000003.pt"]


def test_the_only_one_being_damaged_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "step_00000001.pt", state_of(1))
    damage(tmp_path / "step_00000001.pt")
    with pytest.raises(DamagedCheckpoint, match=r"step_00000001\.pt is damaged"):
        load_first(newest_first(tmp_path))


def test_a_deleted_newest_one_is_still_there_under_its_other_name(tmp_path: Path) -> None:
    keeper = checkpointer(tmp_path)
    for step in (1, 2):
        keeper.save(state_of(step), step, None)
    (tmp_path / "step_00000002.pt").unlink()
    name, step, warnings = read(tmp_path)
    assert (name, step) == ("last.pt", 2)
    assert "is deleted" in warnings[0]
    (tmp_path / "last.pt").unlink()
    assert read(tmp_path) == ("step_00000001.pt", 1, [])
    (tmp_path / "step_00000001.pt").rename(tmp_path / "last.pt")
    assert read(tmp_path) == ("last.pt", 1, [])


def test_a_copy_without_its_links_is_read_alike(tmp_path: Path) -> None:
    keeper = checkpointer(tmp_path / "run")
    for step in (1, 2):
        keeper.save(state_of(step), step, None)
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "run", copy)
    assert not (copy / "last.pt").samefile(copy / "step_00000002.pt")
    assert read(copy) == ("step_00000002.pt", 2, [])
    write(copy / "step_00000003.pt", state_of(3))
    assert read(copy) == ("step_00000003.pt", 3, [])
    damage(copy / "last.pt")
    assert read(copy) == ("step_00000003.pt", 3, [])
