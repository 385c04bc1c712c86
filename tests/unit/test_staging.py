"""A file that is put together in memory is the one that torch would have written."""

import fcntl
import os
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_recipes.checkpointing import staging
from ddp_recipes.checkpointing.staging import StagingWriter
from ddp_recipes.checkpointing.writing import PlainWriter, Writer
from ddp_recipes.runtime.files import write_aside


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let files of a few kilobytes have many blocks, which records begin and end anywhere in."""
    monkeypatch.setattr(staging, "BLOCK", 4096)


def content(size: int) -> dict[str, Any]:
    """Return tensors and plain data, some bytes to thousands each."""
    generator = torch.Generator().manual_seed(size)
    tensors = [torch.randn(size * number, generator=generator) for number in range(4)]
    return {"tensors": tensors, "again": tensors[1], "plain": [None, 1, 0.5, "text", {"a": True}]}


SIZES = [0, 1, 100, 1000, 1024, 5000]


@pytest.mark.parametrize("size", SIZES)
def test_what_is_saved_is_torchs_own_file(size: int, tmp_path: Path) -> None:
    expected = BytesIO()
    torch.save(content(size), expected)
    writer = StagingWriter()
    for name in ("first", "second"):
        write_aside(tmp_path / name, writer.stage(content(size), snapshot=False))
        assert (tmp_path / name).read_bytes() == expected.getvalue()


@pytest.mark.parametrize("make", [StagingWriter, PlainWriter])
@pytest.mark.parametrize("size", SIZES)
def test_a_snapshot_is_written_as_it_was_with_the_right_checksums(
    make: type[Writer], size: int, tmp_path: Path
) -> None:
    expected, held, writer = BytesIO(), tmp_path / "held", make()
    torch.save(content(size), expected)
    for _ in range(2):
        state = content(size)
        staged = writer.stage(state, snapshot=True)
        for tensor in state["tensors"]:
            tensor.zero_()
        write_aside(held, staged)
        loaded = torch.load(held, weights_only=True)
        assert loaded["plain"] == content(size)["plain"]
        for mine, torchs in zip(loaded["tensors"], content(size)["tensors"], strict=True):
            assert torch.equal(mine, torchs)
        assert loaded["again"].data_ptr() == loaded["tensors"][1].data_ptr(), "what was shared is shared"
        with zipfile.ZipFile(held) as ours, zipfile.ZipFile(expected) as torchs_file:
            assert ours.testzip() is None
            sums, torchs_sums = ({each.filename: each.CRC for each in file.infolist()} for file in (ours, torchs_file))
            assert sums.keys() == torchs_sums.keys()
            # Torch takes its id of the file over checksums, which it leaves out then.
            assert {name for name in sums if sums[name] != torchs_sums[name]} <= {"archive/.data/serialization_id"}
        assert held.stat().st_size == len(expected.getvalue())


def test_other_programs_of_this_process_get_their_checksums(tmp_path: Path) -> None:
    writer = StagingWriter()
    writer.stage(content(10), snapshot=True)
    with pytest.raises(AttributeError):
        writer.stage({"cannot be saved": lambda: None}, snapshot=True)
    torch.save(content(10), tmp_path / "theirs")
    with zipfile.ZipFile(tmp_path / "theirs") as archive:
        assert archive.testzip() is None


def test_a_smaller_file_after_a_larger_one_has_nothing_of_it(tmp_path: Path) -> None:
    writer, expected = StagingWriter(), BytesIO()
    torch.save(content(1), expected)
    for size in (5000, 1):
        write_aside(tmp_path / f"{size}", writer.stage(content(size), snapshot=True))
    assert (tmp_path / "1").stat().st_size == len(expected.getvalue())
    assert torch.equal(torch.load(tmp_path / "1")["again"], content(1)["again"])


def test_whole_blocks_go_past_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[tuple[bool, int]] = []
    write = os.write

    def watched(descriptor: int, data: memoryview) -> int:
        writes.append((bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & staging.DIRECT), len(data)))
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", watched)
    write_aside(tmp_path / "file", StagingWriter().stage(content(1024), snapshot=False))
    blocks, rest = divmod((tmp_path / "file").stat().st_size, 4096)
    if not any(direct for direct, _ in writes):
        pytest.skip("this disk has no way past the page cache")
    assert writes == [(True, 4096)] * blocks + [(False, rest)]
