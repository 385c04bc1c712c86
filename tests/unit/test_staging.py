"""A file that is put together in memory is the one that torch would have written."""

import fcntl
import os
import zipfile
from copy import deepcopy
from io import BytesIO
from pathlib import Path
from struct import pack
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from ddp_recipes.checkpointing import snapshots, writing
from ddp_recipes.checkpointing.writing import StagingWriter
from ddp_recipes.runtime.files import write_aside
from helpers.states import same, states


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let files of a few kilobytes have many blocks, which records begin and end anywhere in."""
    for module in (snapshots, writing):
        monkeypatch.setattr(module, "BLOCK", 4096)


def content(size: int) -> dict[str, Any]:
    """Return tensors and plain data, some bytes to thousands each."""
    generator = torch.Generator().manual_seed(size)
    tensors = [torch.randn(size * number, generator=generator) for number in range(4)]
    return {"tensors": tensors, "again": tensors[1], "plain": [None, 1, 0.5, "text", {"a": True}]}


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file for all examples of a property."""
    return tmp_path_factory.mktemp("staged") / "held"


@given(st.lists(states(20), min_size=1, max_size=3))
def test_what_is_saved_is_torchs_own_file(held: Path, contents: list[dict[str, Any]]) -> None:
    writer = StagingWriter()
    for each in contents:
        expected = BytesIO()
        torch.save(each, expected)
        write_aside(held, writer.stage(each, snapshot=False), durable=False)
        assert held.read_bytes() == expected.getvalue()


def without_id(content: bytes) -> bytes:
    """Return a file without torch's id of it, which is taken over checksums, and those are left out at first."""
    with zipfile.ZipFile(BytesIO(content)) as archive:
        assert archive.testzip() is None
        record = archive.getinfo("archive/.data/serialization_id")
        return content.replace(archive.read(record), b"").replace(pack("<I", record.CRC), b"")


@pytest.mark.slow
@given(st.lists(states(20), min_size=1, max_size=3))
def test_a_snapshot_is_written_as_it_was_with_the_right_checksums(held: Path, states: list[dict[str, Any]]) -> None:
    """Of states one after the other, larger and smaller ones."""
    writer = StagingWriter()
    for state in states:
        weights = state["model"]
        state["again"] = next(iter(weights.values()), None)
        expected, as_it_was = BytesIO(), deepcopy(state)
        torch.save(state, expected)
        staged = writer.stage(state, snapshot=True)
        for tensor in weights.values():
            tensor.untyped_storage().fill_(0)
        write_aside(held, staged, durable=False)
        loaded = torch.load(held, weights_only=True)
        assert same(loaded, as_it_was)
        if weights:
            first = next(iter(loaded["model"].values()))
            assert loaded["again"].data_ptr() == first.data_ptr(), "what was shared is shared"
        assert without_id(held.read_bytes()) == without_id(expected.getvalue())


def test_other_programs_of_this_process_get_their_checksums(tmp_path: Path) -> None:
    writer = StagingWriter()
    writer.stage(content(10), snapshot=True)
    with pytest.raises(AttributeError):
        writer.stage({"cannot be saved": lambda: None}, snapshot=True)
    torch.save(content(10), tmp_path / "theirs")
    with zipfile.ZipFile(tmp_path / "theirs") as archive:
        assert archive.testzip() is None


def test_whole_blocks_go_past_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[tuple[bool, int]] = []
    write = os.write

    def watched(descriptor: int, data: memoryview) -> int:
        writes.append((bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & writing.DIRECT), len(data)))
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", watched)
    write_aside(tmp_path / "file", StagingWriter().stage(content(1024), snapshot=False))
    blocks, rest = divmod((tmp_path / "file").stat().st_size, 4096)
    if not any(direct for direct, _ in writes):
        pytest.skip("this disk has no way past the page cache")
    assert writes == [(True, 4096)] * blocks + [(False, rest)]
