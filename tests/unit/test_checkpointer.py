"""Which checkpoints are kept, and what becomes of a save that fails."""

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ddp_recipes.checkpointing.files import newest_first
from ddp_recipes.checkpointing.reading import load, load_first
from ddp_recipes.errors import RecipeError
from ddp_recipes.runtime.tensors import digest
from helpers.checkpoints import checkpointer, mounted, state_of, steps_in, write
from helpers.patience import patience

VALUES = [0.5, 0.3, 0.4, float("nan"), 0.3, 0.9]  # at the steps 1 to 6


@pytest.mark.parametrize(
    ("changes", "kept", "best"),
    [
        ({}, [2, 5, 6], 2),
        ({"save_top_k": 2}, [2, 5, 6], 2),
        ({"save_top_k": 3}, [2, 3, 5, 6], 2),
        ({"save_top_k": 0}, [5, 6], None),
        ({"save_top_k": -1}, [1, 2, 3, 4, 5, 6], 2),
        ({"mode": "max"}, [5, 6], 6),
        ({"mode": "max", "save_top_k": 2}, [1, 5, 6], 6),
        ({"save_last": False}, [2], 2),
        ({"save_last": False, "save_top_k": 2}, [2, 5], 2),
        ({"save_last": False, "save_top_k": -1}, [1, 2, 3, 4, 5, 6], 2),
    ],
    ids=str,
)
def test_the_best_k_and_the_last_two_are_kept(
    changes: dict[str, Any], kept: list[int], best: int | None, tmp_path: Path
) -> None:
    keeper = checkpointer(tmp_path, **changes)
    for step, value in enumerate(VALUES, 1):
        keeper.save(state_of(step), step, value)
        assert newest_first(tmp_path)[0].name == f"step_{max(steps_in(tmp_path)):08d}.pt"
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
        assert steps_in(tmp_path) == [2, 3]
        assert keeper.best is None


def test_the_best_of_an_earlier_start_is_remembered(tmp_path: Path) -> None:
    first = checkpointer(tmp_path, save_top_k=2)
    for step, value in enumerate([0.1, 0.5, 0.4], 1):
        first.save(state_of(step), step, value)
    second = checkpointer(tmp_path, save_top_k=2)
    second.load_state(load(tmp_path / "last.pt")["checkpointer"], 3)
    assert (second.best, second.last) == (tmp_path / "best.pt", tmp_path / "last.pt")
    second.save(state_of(4), 4, 0.3)
    assert steps_in(tmp_path) == [1, 3, 4]
    assert (tmp_path / "best.pt").samefile(tmp_path / "step_00000001.pt")


def test_values_of_files_that_are_gone_are_forgotten(tmp_path: Path) -> None:
    first = checkpointer(tmp_path / "a", save_top_k=1)
    first.save(state_of(1), 1, 0.1)
    elsewhere = checkpointer(tmp_path / "b", save_top_k=1)
    elsewhere.load_state(first.state(), 1)
    elsewhere.save(state_of(2), 2, 0.9)
    assert (tmp_path / "b" / "best.pt").samefile(tmp_path / "b" / "step_00000002.pt")


def test_values_of_another_metric_say_nothing_of_what_is_best_now(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = checkpointer(tmp_path, save_top_k=2)
    first.save(state_of(1), 1, 2.3)
    second = checkpointer(tmp_path, save_top_k=2, monitor="val/accuracy", mode="max")
    second.load_state(load(tmp_path / "last.pt")["checkpointer"], 1)
    assert "checkpoint.monitor was val/loss, and is val/accuracy" in caplog.text
    for step, value in ((2, 0.4), (3, 0.9)):
        second.save(state_of(step), step, value)
    assert (tmp_path / "best.pt").samefile(tmp_path / "step_00000003.pt")


def test_what_is_later_than_the_one_gone_on_from_is_set_aside(tmp_path: Path) -> None:
    """It is damaged, or of a future that will be another one: a next resume must not take it for the newest."""
    first = checkpointer(tmp_path)
    for step, value in enumerate([0.3, 0.2, 0.1], 1):
        first.save(state_of(step), step, value)
    (tmp_path / "step_00000003.pt").write_bytes(b"damaged")
    path, state, _ = load_first(newest_first(tmp_path))
    second = checkpointer(tmp_path)
    second.load_state(state["checkpointer"], 2)
    assert (second.last, second.best) == (tmp_path / "last.pt", tmp_path / "best.pt")
    assert all(link.samefile(path) for link in (second.last, second.best))
    assert newest_first(tmp_path) == [path]
    second.save(state_of(5), 5, 0.4)
    assert steps_in(tmp_path) == [2, 5]
    assert (tmp_path / "best.pt").samefile(path), "the damaged one does not count among the best"
    assert (tmp_path / "step_00000003.pt.aside").read_bytes() == b"damaged"


def test_what_a_killed_save_left_is_removed_by_the_next(tmp_path: Path) -> None:
    keeper = checkpointer(tmp_path)
    keeper.save(state_of(1), 1, None)
    for name in (".step_00000002.pt.part", ".last.pt.part", ".best.pt.part"):
        (tmp_path / name).write_bytes(b"half")
    assert newest_first(tmp_path) == [tmp_path / "step_00000001.pt"]
    keeper.save(state_of(3), 3, 0.1)
    names = {"step_00000001.pt", "step_00000003.pt", "last.pt", "best.pt"}
    assert {path.name for path in tmp_path.iterdir()} == names


def test_a_checkpoint_that_somebody_deleted_is_not_missed(tmp_path: Path) -> None:
    keeper = checkpointer(tmp_path, save_top_k=2)
    for step, value in enumerate([0.1, 0.5], 1):
        keeper.save(state_of(step), step, value)
    (tmp_path / "step_00000001.pt").unlink()
    keeper.save(state_of(3), 3, 0.9)
    assert steps_in(tmp_path) == [2, 3]
    assert (tmp_path / "best.pt").samefile(tmp_path / "step_00000002.pt")


# --- a disk that does not take it ------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "small", "256k") as folder:
        yield folder


@pytest.fixture
def read_only(small_disk: Path) -> Iterator[Callable[[], None]]:
    """A call that makes the small disk read-only, as Linux does after an error."""

    def remount(how: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{how}", str(small_disk)], check=True)

    yield lambda: remount("ro")
    remount("rw")


def test_a_full_disk_is_named_and_harms_nothing(small_disk: Path) -> None:
    path = small_disk / "checkpoints" / "step_00000002.pt"
    write(path.with_name("step_00000001.pt"), state_of(1, size=8_000))
    with pytest.raises(RecipeError) as failure:
        write(path, state_of(2, size=80_000))
    assert failure.value.exit_status == 1
    message = str(failure.value)
    assert f"{path} could not be written: No space left on device." in message
    assert "It needs about 960," in message
    assert "Earlier checkpoints are untouched." in message
    assert [entry.name for entry in path.parent.iterdir()] == ["step_00000001.pt"]
    assert load(path.with_name("step_00000001.pt"))["cursor"]["step"] == 1


def test_a_full_disk_is_named_by_a_saver_and_the_earlier_one_stays_the_last(small_disk: Path) -> None:
    keeper = checkpointer(small_disk / "checkpoints")
    keeper.save(state_of(1, size=8_000), 1, 0.5)
    with pytest.raises(RecipeError, match=r"step_00000002\.pt could not be written: No space left on device"):
        keeper.save(state_of(2, size=80_000), 2, 0.4)
    assert load(small_disk / "checkpoints" / "best.pt")["cursor"]["step"] == 1
    assert load(small_disk / "checkpoints" / "last.pt")["cursor"]["step"] == 1
    keeper.save(state_of(3), 3, 0.6)
    assert steps_in(small_disk / "checkpoints") == [1, 3]


@pytest.mark.parametrize("folder", ["checkpoints", "new"])
def test_a_read_only_folder_is_named(folder: str, small_disk: Path, read_only: Callable[[], None]) -> None:
    checkpointer(small_disk / "checkpoints").save(state_of(1), 1, 0.5)
    read_only()
    with pytest.raises(RecipeError) as failure:
        checkpointer(small_disk / folder).save(state_of(2), 2, 0.4)
    path = small_disk / folder / "step_00000002.pt"
    assert str(failure.value).startswith(f"{path} could not be written: Read-only file system. It needs about ")
    assert [state["cursor"]["step"] for _, state, _ in [load_first(newest_first(small_disk / "checkpoints"))]] == [1]


# --- saved while training goes on ------------------------------------------------------------------------------------


def test_async_save_writes_the_state_as_it_was_when_asked(tmp_path: Path) -> None:
    saver = checkpointer(tmp_path, async_save=True)
    state = state_of(3)
    expected = digest(state)
    saver.save(state, 3, 0.5)
    for tensor in state["model"].values():
        tensor.zero_()  # training goes on
    saver.wait(None)
    written = load(tmp_path / "last.pt")
    assert digest({name: written[name] for name in state}) == expected
    assert (saver.last, saver.best) == (tmp_path / "last.pt", tmp_path / "best.pt")


def test_a_copy_is_written_once_the_loop_has_taken_another_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddp_recipes.checkpointing.manager.MAX_WAIT_S", 600.0)
    saver = checkpointer(tmp_path, async_save=True)
    for step in (1, 2):
        saver.save(state_of(step), step, 0.5)
        assert step not in steps_in(tmp_path)
        saver.wait(0)
        while saver.wait(0.1):
            pass
        assert step in steps_in(tmp_path)


def test_a_copy_is_written_soon_though_the_next_step_takes_long(tmp_path: Path) -> None:
    saver = checkpointer(tmp_path, async_save=True)
    saver.save(state_of(1), 1, 0.5)
    deadline = time.monotonic() + patience(30)
    while not (tmp_path / "last.pt").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert load(tmp_path / "last.pt")["cursor"]["step"] == 1


def test_async_saves_leave_what_others_leave(tmp_path: Path) -> None:
    for folder, wanted in ((tmp_path / "async", True), (tmp_path / "plain", False)):
        saver = checkpointer(folder, async_save=wanted)
        for step, value in ((1, 0.5), (2, 0.3), (3, 0.4)):
            saver.save(state_of(step), step, value)
        saver.wait(None)
    assert steps_in(tmp_path / "async") == steps_in(tmp_path / "plain") == [2, 3]


def test_a_failed_async_save_raises_when_it_is_next_asked_for(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    for ask in (lambda saver: saver.wait(None), lambda saver: saver.save(state_of(2), 2, 0.5)):
        saver = checkpointer(tmp_path / "checkpoints", async_save=True)
        saver.save(state_of(1), 1, 0.5)
        with pytest.raises(RecipeError, match=r"step_00000001\.pt could not be written: File exists"):
            ask(saver)
        assert not saver.wait(None), "it is reported once"
