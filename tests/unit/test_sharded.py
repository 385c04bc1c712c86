"""Checkpoints in parts: complete or absent, whatever is missing of them, and the same whole by whoever reads it."""

import json
import os
import shutil
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from safetensors.torch import load as safetensors, load_file

import ddp_recipes
from ddp_recipes.checkpointing.files import newest_first, step_files
from ddp_recipes.checkpointing.manager import Checkpointer, FileCheckpointer
from ddp_recipes.checkpointing.parts import Stored
from ddp_recipes.checkpointing.reading import load, load_first
from ddp_recipes.checkpointing.sharded import Writers, make_checkpointer
from ddp_recipes.errors import RecipeError, RequestError, RunFailed
from ddp_recipes.runtime.tensors import OwnRows, digest, put_together, span
from helpers.checkpoints import mounted, plain, settings as saving, state_of, steps_in
from helpers.states import same, states

RANKS = 3


ONES, SQUARE = torch.ones(2), torch.arange(9.0).view(3, 3)


def dealt(state: dict[str, Any], rank: int, ranks: int) -> dict[str, Any]:
    """Return a rank's part of a state: rows of the larger tensors."""

    def part(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: part(inside) for name, inside in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(map(part, value))
        if isinstance(value, torch.Tensor) and value.dim() == 2:
            start, stop = span(len(value), rank, ranks)
            return OwnRows(value[start:stop], start, value.shape)
        return value

    found: dict[str, Any] = part(state)
    return found


class Team:
    """The checkpointers of all ranks of a start, which save as the loop has them."""

    def __init__(self, folder: Path, ranks: int = RANKS, start: str = "0000abcd", **changes: Any) -> None:
        self.ranks = ranks
        self.each: list[Checkpointer] = [
            make_checkpointer(folder, saving(**changes), Writers(rank, ranks, start)) for rank in range(ranks)
        ]

    def begin(self, state: dict[str, Any], value: float | None = None, without: tuple[int, ...] = ()) -> None:
        """Begin to save on all ranks but some."""
        for rank, checkpointer in enumerate(self.each):
            if rank not in without:
                checkpointer.save(dealt(state, rank, self.ranks), state["cursor"]["step"], value)

    def busy(self) -> bool:
        """Whether some rank still is, once what they do by themselves is done."""
        for checkpointer in self.each[1:]:
            checkpointer.wait(None)
        return self.each[0].wait(None)

    def save(self, state: dict[str, Any], value: float | None = None) -> None:
        """Save on all ranks."""
        self.begin(state, value)
        while self.busy():
            pass


def saved(folder: Path, steps: int = 2, **changes: Any) -> Team:
    """Return a team that has saved so many checkpoints of different weights."""
    team = Team(folder, **changes)
    for step in range(1, steps + 1):
        team.save(state_of(step, size=7))
    return team


def parts_of(folder: Path, step: int) -> list[Path]:
    return sorted(folder.glob(f"step_{step:08d}-*/*.safetensors"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for all examples of a property."""
    return tmp_path_factory.mktemp("parts")


@settings(max_examples=30)
@given(states(9), st.integers(1, 4), st.data())
@example({"model": {}, "m/a": ONES, "m": {"a": ONES + 1, "a[0]": ONES + 2}, "": {"m/a": ONES + 3}}, 1, None)
@example({"model": {}, "m[0]": ONES, "m": [ONES + 1]}, 1, None)
@example({"model": {"w": SQUARE, "turned": SQUARE.mT}}, 1, None)
def test_what_ranks_save_is_read_as_one_to_the_bit(
    folder: Path, state: dict[str, Any], ranks: int, data: st.DataObject | None
) -> None:
    """Of few rows some ranks have none."""
    state["cursor"] = {"step": 1}
    team = Team(folder, ranks)
    team.save(state)
    content = load(folder / "last.json", readers=data.draw(st.sampled_from([0, ranks])) if data else 0)
    assert content.pop("checkpointer") == {"values": {}, "monitor": "val/loss"}
    for name, value in state["model"].items():
        if data and isinstance(stored := content["model"][name], Stored):
            start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(value))] * 2)))
            assert same(stored.rows(start, stop), value[start:stop].contiguous())
    assert same(plain(put_together(content)), state)
    assert team.each[0].last == folder / "last.json"
    assert [path.name for path in folder.glob("step_*-*/*.json")] == []


def test_ranks_that_do_not_answer_leave_a_checkpoint_whole(tmp_path: Path) -> None:
    """One that was stopped as it was to verify a part: none is damaged for that, and no other one is tried."""
    saved(tmp_path)
    asked: list[object] = []

    def silent(checks: object) -> NoReturn:
        asked.append(checks)
        raise RunFailed("Rank 1 of 3 did not arrive", unresponsive=[1])

    with pytest.raises(RunFailed, match="did not arrive"):
        load_first([path for _, path in sorted(step_files(tmp_path).items(), reverse=True)], silent, RANKS)
    assert len(asked) == 1


def test_what_is_kept_is_handed_over_once_then_read_again(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    expected = digest(state_of(1, size=7))
    content = load(tmp_path / "last.json", readers=RANKS)
    part = content["model"]["weight"].rows(*span(7, 1, RANKS))  # as rank 1 asks for it
    torch.testing.assert_close(part, state_of(1, size=7)["model"]["weight"][3:6], rtol=0, atol=0)
    part.zero_()  # training goes on
    checkpointer = content.pop("checkpointer")
    for _ in range(2):
        assert digest(plain(put_together(content))) == expected
    assert checkpointer == {"values": {}, "monitor": "val/loss"}


def test_nothing_is_pickled_and_others_can_read_it(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    for path in tmp_path.rglob("*"):
        if path.is_file():
            begin = path.read_bytes()[:2]
            assert begin[:1] != b"\x80"  # the opcode that a pickle begins with
            assert begin != b"PK"
    content = json.loads((tmp_path / "step_00000001.json").read_text())["content"]
    parts = [load_file(path) for path in parts_of(tmp_path, 1)]
    assert [name for name, *_ in content["parts"]] == [path.name for path in parts_of(tmp_path, 1)]
    whole = torch.cat([part["model/weight"] for part in parts])
    torch.testing.assert_close(whole, state_of(1, size=7)["model"]["weight"], rtol=0, atol=0)
    assert parts[0]["model/half"].dtype == torch.bfloat16


def test_a_weight_of_two_names_is_written_once(tmp_path: Path) -> None:
    state = state_of(1, size=1000)
    before = Team(tmp_path / "one")
    before.save(state)
    state["model"]["tied"] = state["model"]["weight"]
    Team(tmp_path / "two").save(state)
    sizes = [sum(path.stat().st_size for path in parts_of(tmp_path / name, 1)) for name in ("one", "two")]
    assert sizes[0] == sizes[1]
    weights = put_together(load(tmp_path / "two" / "last.json")["model"])
    torch.testing.assert_close(weights["tied"], weights["weight"], rtol=0, atol=0)


def flip(path: Path, at: int, bits: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= bits
    path.write_bytes(content)


@settings(max_examples=80)
@given(st.sampled_from(range(RANKS + 1)), st.booleans(), st.sampled_from([0, RANKS]), st.data())
def test_a_byte_that_is_changed_or_gone_is_found(
    two: Path, number: int, gone: bool, readers: int, data: st.DataObject
) -> None:
    """In any part it is named. Where one blank of an index becomes another, that harms nothing."""
    path = [*parts_of(two, 2), two / "step_00000002.json"][number]
    good = path.read_bytes()
    at = data.draw(st.integers(0, len(good) - 1))
    try:
        path.write_bytes(good[:at]) if gone else flip(path, at, data.draw(st.integers(1, 255)))
        blank = path.read_bytes().split() == good.split()
        named = (
            f"rank_{number}_of_3.safetensors, which rank {number} wrote, "
            if number < RANKS
            else "step_00000002.json is"
        )
        with pytest.raises(RequestError, match=named) if number < RANKS or not blank else nullcontext():
            load(two / "step_00000002.json", readers=readers)
    finally:
        path.write_bytes(good)


def piped(path: Path) -> None:
    """Put a pipe in the place of a file, to which nobody writes."""
    path.unlink()
    os.mkfifo(path)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two checkpoints."""
    saved(folder := tmp_path_factory.mktemp("two"))
    return folder


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a pipe": (
        lambda folder: piped(parts_of(folder, 2)[1]),
        "which rank 1 wrote, cannot be read: it is no regular file",
    ),
    "missing": (lambda folder: parts_of(folder, 2)[1].unlink(), "rank_1_of_3.safetensors, which rank 1 wrote, is miss"),
    "of another checkpoint": (
        lambda folder: shutil.copy(parts_of(folder, 1)[1], parts_of(folder, 2)[1]),
        "rank_1_of_3.safetensors, which rank 1 wrote, does not match its checksum",
    ),
    "one bit": (
        lambda folder: flip(parts_of(folder, 2)[0], -2, 1),
        "rank_0_of_3.safetensors, which rank 0 wrote, does not match its checksum",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_one_is_named_and_the_one_before_is_used(kind: str, tmp_path: Path) -> None:
    damage, reason = DAMAGE[kind]
    saved(tmp_path)
    damage(tmp_path)
    for readers in (0, RANKS):
        with pytest.raises(RequestError, match=reason):
            load(tmp_path / "step_00000002.json", readers=readers)
    with pytest.raises(RequestError, match=reason):
        ddp_recipes.export(tmp_path / "step_00000002.json", tmp_path / "out.safetensors")
    path, state, warnings = load_first(newest_first(tmp_path))
    assert (path.name, state["cursor"]["step"]) == ("step_00000001.json", 1)
    assert "step_00000002.json is damaged" in warnings[0]


@pytest.mark.parametrize(
    "without", [pytest.param((0,), id="0"), pytest.param((1,), id="1"), pytest.param((1, 2), id="all others")]
)
def test_without_every_part_there_is_none_and_the_next_start_sweeps_up(
    without: tuple[int, ...], tmp_path: Path
) -> None:
    team = saved(tmp_path, 1)
    team.begin(state_of(2, size=7), without=without)
    for _ in range(5):
        team.busy()
    assert (steps_in(tmp_path), len(parts_of(tmp_path, 2))) == ([1], RANKS - len(without))
    assert load(tmp_path / "last.json")["cursor"]["step"] == 1
    later = Team(tmp_path, start="00001234")
    later.save(state_of(2, size=7))
    assert (steps_in(tmp_path), {path.parent.name for path in parts_of(tmp_path, 2)}) == (
        [1, 2],
        {"step_00000002-00001234"},
    )


def test_parts_are_kept_and_deleted_with_their_checkpoint_whoever_does_it(tmp_path: Path) -> None:
    team = Team(tmp_path)
    for step, value in ((1, 0.5), (2, 0.3), (3, 0.4), (4, 0.6)):
        team.save(state_of(step, size=7), value)
    assert steps_in(tmp_path) == [2, 3, 4]
    assert {path.name[:13] for path in tmp_path.glob("step_*-*")} == {f"step_{step:08d}" for step in (2, 3, 4)}
    assert load(tmp_path / "best.json")["cursor"]["step"] == 2
    alone = FileCheckpointer(tmp_path, saving(), background=False)  # goes on without parts
    alone.load_state(load(tmp_path / "last.json")["checkpointer"], 4)
    for step in (5, 6):
        alone.save(state_of(step, size=7), step, 0.2)
    assert {path.name for path in tmp_path.iterdir()} == {
        *("best.pt", "last.pt", "step_00000005.pt", "step_00000006.pt"),
    }


def test_a_step_that_is_saved_again_in_parts_or_whole_has_one_checkpoint(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    alone = FileCheckpointer(tmp_path, saving(), background=False)
    alone.save(state_of(1, size=7), 1, None)
    assert {path.name for path in tmp_path.iterdir()} == {"last.pt", "step_00000001.pt"}
    Team(tmp_path, start="00000002").save(state_of(1, size=7))
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == {"last.json", "step_00000001.json"}
    assert len(parts_of(tmp_path, 1)) == RANKS


def test_an_index_of_an_earlier_version_is_read_and_deleted_as_one(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    for name in ("last", "step_00000001"):  # as they were called
        (tmp_path / f"{name}.json").rename(tmp_path / f"{name}.pt")
    path, state, _ = load_first(newest_first(tmp_path))
    assert (path.name, state["cursor"]["step"]) == ("step_00000001.pt", 1)
    team = Team(tmp_path, start="00000002")
    for step in (2, 3):
        team.save(state_of(step, size=7))
    assert steps_in(tmp_path) == [2, 3]
    assert len([*tmp_path.glob("step_*-*")]) == 2
    assert not [*tmp_path.glob("*.pt")]


def test_async_save_writes_the_state_as_it_was_when_asked(tmp_path: Path) -> None:
    team, state = Team(tmp_path, async_save=True), state_of(3, size=7)
    expected = digest(state)
    team.begin(state)
    for tensor in state["model"].values():
        tensor.zero_()  # training goes on
    while team.busy():
        pass
    written = put_together(load(tmp_path / "last.json"))
    assert digest({name: written[name] for name in state}) == expected


def test_to_wait_for_a_save_is_to_wait_for_all_parts(tmp_path: Path) -> None:
    team, state = Team(tmp_path), state_of(1, size=7)
    team.begin(state, without=(1, 2))
    others = threading.Thread(target=lambda: [team.begin(state, without=(0, rank)) for rank in (2, 1)])
    others.start()
    assert not team.each[0].wait(None)
    others.join()
    assert load(tmp_path / "last.json")["cursor"]["step"] == 1


def test_parts_that_do_not_come_are_not_waited_for(tmp_path: Path) -> None:
    team = saved(tmp_path, 1)
    team.begin(state_of(2, size=7), without=(1,))
    assert not team.each[0].wait(None)
    assert steps_in(tmp_path) == [1]
    team.save(state_of(3, size=7))
    assert steps_in(tmp_path) == [1, 3]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "small", "1m") as folder:
        yield folder


def test_where_there_is_no_room_nothing_is_written(small_disk: Path) -> None:
    folder = small_disk / "checkpoints"
    team = Team(folder)
    team.save(state_of(1, size=8_000))
    for checkpointer in team.each:
        with pytest.raises(
            RecipeError, match=r"is not written: it needs about 1,200,000 bytes; free on that disk: "
        ) as error:
            checkpointer.save(dealt(state_of(2, size=100_000), 0, RANKS), 2, None)
        assert error.value.exit_status == 1
    assert parts_of(folder, 2) == []
    assert load(folder / "last.json")["cursor"]["step"] == 1
    team = Team(folder, start="00000002")
    team.save(state_of(2, size=8_000))
    assert steps_in(folder) == [1, 2]
    assert len([*folder.glob("step_*-*")]) == 2


def test_an_index_leads_nowhere_else(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    path = tmp_path / "step_00000001.json"
    for name, value in (("folder", "../step_00000001-0000abcd"), ("parts", [["../x", 0, 1, 2]])):
        content = json.loads(path.read_text())["content"] | {name: value}
        path.write_bytes(_index(content))
        with pytest.raises(RequestError, match="it names"):
            load(path)


def _index(content: dict[str, Any]) -> bytes:
    return json.dumps({"checksum": f"{zlib.crc32(json.dumps(content).encode()):08x}", "content": content}).encode()


# --- an index that somebody made ----------------------------------------------------------------------------------


def crafted(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Change the index of step 1, and make its checksum right again."""
    path = folder / "step_00000001.json"
    content = json.loads(path.read_text())["content"]
    change(content)
    path.write_bytes(_index(content))
    return path


WEIGHT = "model/weight"  # [7, 3] in three parts: rows 0 to 3, 3 to 6, 6 to 7
INDICES: dict[str, Callable[[dict[str, Any]], object]] = {
    "gap at the end": lambda row: row["at"].pop(),
    "gap in between": lambda row: row["at"].pop(1),
    "no part": lambda row: row["at"].clear(),
    "overlap": lambda row: row["at"].__setitem__(1, [1, 2, 6]),
    "twice": lambda row: row["at"].append([0, 0, 3]),
    "another part's rows": lambda row: row.update(at=[[1, 0, 3], [0, 3, 6], [2, 6, 7]]),
    "more rows than a part has": lambda row: row.update(shape=[9, 3], at=[[0, 0, 3], [1, 3, 6], [2, 6, 9]]),
    "part 99": lambda row: row["at"].__setitem__(2, [99, 6, 7]),
    "part -1": lambda row: row["at"].__setitem__(2, [-1, 6, 7]),
    "backwards": lambda row: row.update(shape=[3, 3], at=[[0, 0, 5], [1, 5, 3]]),
    "negative rows": lambda row: row.update(shape=[-1, 3]),
    "negative columns": lambda row: row.update(shape=[7, -3]),
    "other columns": lambda row: row.update(shape=[7, 2]),
    "no dimension": lambda row: row.update(shape=[]),
    "huge": lambda row: row.update(shape=[1 << 70, 3], at=[[0, 0, 1 << 70]]),
    "huge and empty": lambda row: row.update(shape=[0, 1 << 70], at=[]),
    "half a row": lambda row: row["at"].__setitem__(0, [0, 0, 3.0]),
    "other numbers": lambda row: row.update(dtype="I32"),
    "no dtype": lambda row: row.update(dtype="F31"),
}


@pytest.mark.parametrize("readers", [0, RANKS])
@pytest.mark.parametrize("kind", INDICES)
def test_an_index_that_does_not_have_each_number_once_is_refused(kind: str, readers: int, tmp_path: Path) -> None:
    saved(tmp_path, 1)
    path = crafted(tmp_path, lambda content: INDICES[kind](content["rows"][WEIGHT]))
    with pytest.raises(RequestError, match=r"step_00000001.json is damaged or no checkpoint: .*"):
        load(path, readers=readers)


@pytest.mark.parametrize("number", [-1, 0, 1, 2, 4, True, None, "3", 3.5])
def test_an_index_of_another_format_is_refused(number: object, tmp_path: Path) -> None:
    saved(tmp_path, 1)
    path = crafted(tmp_path, lambda content: content.update(format=number))
    with pytest.raises(RequestError, match=r"step_00000001.json (is damaged|has format 4, this version reads up to 3)"):
        load(path)


@settings(max_examples=150)
@given(st.lists(st.integers(0, 8), max_size=5), st.data())
def test_rows_are_read_as_they_were_or_the_index_is_refused(two: Path, cuts: list[int], data: st.DataObject) -> None:
    """However somebody cuts a tensor: what is read is what was saved, in every number."""
    path = two / "step_00000001.json"
    good, expected = path.read_bytes(), state_of(1, size=7)["model"]["weight"]
    numbers = data.draw(st.lists(st.integers(-1, RANKS), min_size=len(cuts) + 1, max_size=len(cuts) + 1))
    spans = [*zip(numbers, [0, *cuts], [*cuts, 7], strict=True)]
    shape = data.draw(st.just([7, 3]) | st.lists(st.integers(-1, 9), max_size=3))
    try:
        crafted(two, lambda content: content["rows"][WEIGHT].update(at=data.draw(st.permutations(spans)), shape=shape))
        whole = put_together(load(path, readers=data.draw(st.sampled_from([0, RANKS]))))["model"]["weight"]
    except RequestError:
        return
    finally:
        path.write_bytes(good)
    assert same(whole, expected)


NUMBERS = st.integers(-1, 90) | st.sampled_from([0, 12, 36, 1 << 62, 1 << 70, True, 0.0, None])
ENTRIES = st.fixed_dictionaries(
    {},
    optional={
        "data_offsets": st.lists(NUMBERS, min_size=1, max_size=3),
        "shape": st.lists(NUMBERS, max_size=3),
        "dtype": st.sampled_from(["F32", "I32", "BF16", "F64", "U8", "F31", 3]),
    },
)


@settings(max_examples=150)
@given(st.integers(0, RANKS - 1), ENTRIES, st.sampled_from([None, 0, 7, 1 << 40, (1 << 64) - 1]), st.data())
def test_a_part_is_read_as_others_read_it_or_refused(
    two: Path, number: int, entry: dict[str, Any], length: int | None, data: st.DataObject
) -> None:
    """Whatever its header says, with checksums that are right."""
    path, part = two / "step_00000001.json", parts_of(two, 1)[number]
    good, whole = path.read_bytes(), part.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:end])
    header[data.draw(st.sampled_from(sorted(header.keys() - {"__metadata__"})))].update(entry)
    text = json.dumps(header).encode()
    content = (len(text) if length is None else length).to_bytes(8, "little") + text + whole[end:]
    sums = [len(content), zlib.crc32(content)]
    try:
        part.write_bytes(content)
        crafted(two, lambda index: index["parts"][number].__setitem__(slice(2, None), sums))
        weights = put_together(load(path, readers=data.draw(st.sampled_from([0, RANKS]))))["model"]
        theirs = [safetensors(each.read_bytes()) for each in parts_of(two, 1)]
    except RequestError:
        return
    finally:
        path.write_bytes(good)
        part.write_bytes(whole)
    assert same(weights["weight"], torch.cat([each["model/weight"] for each in theirs]))
    assert same(weights["half"], theirs[0]["model/half"])


NO_FILES: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "link to nothing": lambda path: path.symlink_to("nothing"),
}


@pytest.mark.parametrize("kind", NO_FILES)
def test_what_is_no_file_is_never_waited_for(kind: str, tmp_path: Path) -> None:
    """In the place of a part it is named, in that of an index as well; saves go on."""
    saved(tmp_path, 2)
    part = parts_of(tmp_path, 2)[1]
    part.unlink()
    NO_FILES[kind](part)
    path, _, warnings = load_first(newest_first(tmp_path))
    assert path.name == "step_00000001.json"
    assert "its part step_00000002-0000abcd/rank_1_of_3.safetensors, which rank 1 wrote, " in warnings[0]
    index = tmp_path / "step_00000002.json"
    index.unlink()
    NO_FILES[kind](index)
    with pytest.raises(RequestError, match=r"step_00000002.json"):
        load(index)
    (tmp_path / "last.json").unlink()
    NO_FILES[kind](tmp_path / "best.json")
    team = Team(tmp_path, start="00001234")
    for step in (3, 4, 5):
        team.save(state_of(step, size=7))
    assert load(tmp_path / "last.json")["cursor"]["step"] == 5
