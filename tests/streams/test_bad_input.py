"""Shards that are missing, damaged or changed, and rows that cannot be decoded: an error by name, or skipped."""

import gzip
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from ddp_recipes.errors import RequestError
from ddp_recipes.reporting.run_directory import Summary
from ddp_recipes.streams import Stream
from ddp_recipes.streams.cache import Cache
from ddp_recipes.streams.index import make
from helpers.shards import ROWS, write_shards

pytest.importorskip("pyarrow")

Run = Callable[..., Summary]


def indexed(folder: Path) -> Path:
    make(str(folder), Cache(folder / ".cache"), 1, lambda done, total: None)
    return folder


def changed(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda file: file.unlink(), "the shard part-2.jsonl is missing. Put it back"),
        (lambda file: os.truncate(file, 99), "part-2.jsonl is cut short: it has 99 bytes, and had 1,"),
        (lambda file: file.write_bytes(b"{}\n" * 999), "part-2.jsonl is changed: it has 2,997 bytes"),
        (lambda file: file.with_name("part-9.jsonl").write_bytes(b"{}"), "part-9.jsonl is not in index.json"),
        (lambda file: (file.parent / "index.json").write_text("{}"), "index.json is no index of a stream"),
    ],
    ids=["missing", "cut short", "changed", "new", "no index"],
)
def test_shards_that_do_not_fit_their_index_are_refused(
    damage: Callable[[Path], None], message: str, shards: Callable[..., Path]
) -> None:
    folder = indexed(shards(".jsonl"))
    assert len(Stream(str(folder))) == 61
    damage(folder / "part-2.jsonl")
    with pytest.raises(RequestError, match=message):
        Stream(str(folder))


@pytest.mark.parametrize(
    ("suffix", "has_index", "message"),
    [
        *((suffix, True, "it has changed since .* checksum") for suffix in (".parquet", ".jsonl", ".jsonl.gz")),
        (".jsonl", False, "it was written since this run indexed it"),
    ],
)
def test_a_shard_that_changed_but_for_its_size_is_named_when_it_is_opened(
    suffix: str, has_index: bool, message: str, shards: Callable[..., Path], tmp_path: Path
) -> None:
    folder = shards(suffix)
    if has_index:
        indexed(folder)
    stream = Stream(str(folder), inputs="a", cache={"folder": str(tmp_path / "cache")})
    changed(folder / f"part-2{suffix}")
    assert stream[5] == 5
    with pytest.raises(RuntimeError, match=rf"part-2{suffix} cannot be read: {message}"):
        stream[25]


def test_a_copy_of_a_set_is_the_same_set(shards: Callable[..., Path]) -> None:
    """Its files have other dates, so their checksums are computed."""
    folder = indexed(shards(".parquet"))
    os.utime(folder / "part-2.parquet", (1, 1))
    assert Stream(str(folder), inputs="a")[25] == 25


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".csv"])
def test_a_shard_of_another_schema_is_refused_by_name(suffix: str, shards: Callable[..., Path]) -> None:
    folder = shards(suffix)
    other = [{**row, "b": "text"} for row in ROWS[:3]] if suffix != ".csv" else ROWS[:3]
    write_shards(folder / "z", suffix, other, (0, 3))
    if suffix == ".csv":
        file = folder / "z" / "part-0.csv"
        file.write_text(file.read_text().replace("b", "c", 1))
    with pytest.raises(RequestError, match=r"z/part-0.* has another schema than .*/part-0.*: .*b \("):
        Stream(str(folder))


def test_a_text_beside_tar_files_is_no_shard_of_theirs(shards: Callable[..., Path]) -> None:
    folder = shards(".tar")
    (folder / "README.txt").write_text("How this was made.")
    with pytest.raises(RequestError, match=r"part-0.tar has another schema than .*README.txt: another format"):
        Stream(str(folder))
    assert len(Stream(f"{folder}/*.tar")) == 61


def test_what_is_no_such_file_is_refused_by_name(shards: Callable[..., Path]) -> None:
    for suffix in (".parquet", ".arrow", ".tar", ".jsonl.gz", ".jsonl.zst", ".csv"):
        folder = shards(suffix)
        (folder / f"part-1{suffix}").write_bytes(b"" if suffix == ".csv" else b"nothing that anybody knows")
        with pytest.raises(RequestError, match=rf"part-1{suffix} cannot be read: it "):
            Stream(str(folder), cache={"folder": str(folder / "cache")})


@pytest.mark.parametrize("compression", ["gz", "zst"])
def test_a_compressed_shard_that_is_cut_short_is_named(
    compression: str, shards: Callable[..., Path], tmp_path: Path
) -> None:
    file = shards(f".jsonl.{compression}") / f"part-2.jsonl.{compression}"
    os.truncate(file, file.stat().st_size - 3)
    with pytest.raises(RequestError, match=r"part-2.* cannot be read: it cannot be decompressed: .*(cut short|ended)"):
        Stream(str(file), cache={"folder": str(tmp_path / "cache")})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("0.csv", b"a,b\r1,2\r", "names no columns in UTF-8: new-line character"),
        ("0.csv", "größe\n1\n".encode("latin-1"), "names no columns in UTF-8: .* can't decode byte 0xf6"),
        (
            "0.jsonl",
            b'[{"a": 1},\n{"a": 2}]',
            "has no JSON object, and should have one a line: of the first line it is",
        ),
    ],
)
def test_files_that_are_not_what_they_are_called_are_named(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RequestError, match=rf"{name} cannot be read: .*{message}"):
        Stream(str(tmp_path))


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = arrow.Table.from_arrays([arrow.array([1]), arrow.array([2])], names=["a", "a"])
    parquet.write_table(table, tmp_path / "0.parquet")
    (tmp_path / "0.csv").write_text("a,a\n1,2\n")
    for name in ("0.parquet", "0.csv"):
        with pytest.raises(RequestError, match=rf"{name} cannot be read: it has two columns 'a'"):
            Stream(str(tmp_path / name))


def test_files_of_a_tar_that_are_no_columns_are_named(tmp_path: Path) -> None:
    for name, members in {"0.tar": ("LICENSE", "image_1"), "1.tar": ("a.txt", "a.TXT", "b.txt")}.items():
        with tarfile.open(tmp_path / name, "w") as file:
            for member in members:
                file.addfile(tarfile.TarInfo(member))
    with pytest.raises(RequestError, match=r"0.tar cannot be read: no file in it has a suffix, .* is 'LICENSE'"):
        Stream(str(tmp_path / "0.tar"))
    stream = Stream(str(tmp_path / "1.tar"), inputs="txt")
    with pytest.raises(ValueError, match=r"Row 0 of .*1.tar cannot be decoded: it has two files 'a.txt'"):
        stream[0]
    assert stream[1] == ""


def test_an_image_of_more_than_eight_bits_is_named(tmp_path: Path) -> None:
    """All above 255 was 255."""
    Image.new("I;16", (4, 4), 3000).save(tmp_path / "0.png")
    with tarfile.open(tmp_path / "0.tar", "w") as file:
        file.add(tmp_path / "0.png", "0.png")
    with pytest.raises(ValueError, match=r"Row 0 of .*0.tar cannot be decoded: its 'png' .* has mode I"):
        Stream(str(tmp_path / "0.tar"), inputs="png")[0]


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE], ids=["hard", "symbolic"])
def test_a_link_in_a_tar_is_named(kind: bytes, form: int, tmp_path: Path) -> None:
    """Its sample was left out: tar makes one of each further name of a file."""
    link = tarfile.TarInfo("folder/2.txt" if form == tarfile.USTAR_FORMAT else f"{'folder/' * 30}2.txt")
    link.type, link.linkname = kind, "1.txt"
    with tarfile.open(tmp_path / "0.tar", "w", format=form) as file:
        file.addfile(tarfile.TarInfo("1.txt"))
        file.addfile(link)
    with pytest.raises(RequestError, match=r"0.tar cannot be read: '.*/2.txt' is a link, of which there is no content"):
        Stream(str(tmp_path))


def test_a_shard_beside_its_compressed_self_is_refused(shards: Callable[..., Path], tmp_path: Path) -> None:
    folder = shards(".jsonl")
    (folder / "part-1.jsonl.gz").write_bytes(gzip.compress((folder / "part-1.jsonl").read_bytes()))
    with pytest.raises(RequestError, match=r"part-1.jsonl.gz is there decompressed, too: its rows would come twice"):
        Stream(str(folder), cache={"folder": str(tmp_path / "cache")})


def test_wrong_keys_are_refused(shards: Callable[..., Path], tmp_path: Path) -> None:
    folder = str(shards(".parquet"))
    (tmp_path / "empty").mkdir()
    for given, message in (
        ({"path": str(tmp_path / "nowhere")}, "there is no folder .*nowhere"),
        ({"path": str(tmp_path / "empty")}, "has no shard. Allowed are files .parquet"),
        ({"path": f"{folder}/x-*.parquet"}, "x-.* has no shard"),
        ({"path": f"{folder}/x-1.parquet"}, "there is no file .*x-1.parquet"),
        ({"path": "nowhere://bucket/set"}, "is in a store that cannot be used"),
        ({"path": f"zip://set::{folder}.zip"}, "lies within an archive. Unpack that"),
        ({"inputs": "aa"}, "has no column 'aa'. Did you mean 'a'"),
        ({"targets": "a"}, "data.inputs=null makes a sample of the whole row"),
        ({"window": 0}, "data.window=0 is not allowed"),
        ({"on_error": "ignore"}, "data.on_error=ignore is not known. Allowed: raise, skip"),
        ({"split": "val"}, "has 61 rows, of which val gets none"),
        ({"path": " "}, "data.path is empty. Give a folder"),
        ({"val_fraction": 1.5, "split": "val"}, "data.val_fraction=1.5 is not allowed. Allowed: a number from 0 to 1"),
        ({"val_fraction": -0.1, "split": "train"}, "data.val_fraction=-0.1 is not allowed"),
        ({"path": [folder, folder]}, r"is no path. Allowed: one folder, .*; several sets are a mixture"),
        ({"inputs": 3}, "data.inputs or data.targets is 3. Allowed: a column's name, a list of names, or null"),
        ({"memory_mb": -1}, "data.memory_mb=-1 is not allowed. Allowed: a number at least 0"),
        ({"options": 3}, "data.options=3 is not allowed. Allowed: options by name"),
        ({"cache": {"size": 3}}, "data.cache.size is not known. Allowed: folder, limit_gb, ahead, retries, timeout_s"),
        ({"cache": {"limit_gb": "10"}}, "data.cache.limit_gb=10 is not allowed. Allowed: a number at least 0"),
        ({"cache": {"retries": -1}}, "data.cache.retries=-1 is not allowed. Allowed: a whole number at least 0"),
    ):
        with pytest.raises(RequestError, match=message):
            Stream(**{"path": folder, **given})


def broken(rows: list[dict[str, Any]], numbers: tuple[int, ...]) -> list[dict[str, Any]]:
    return [{**row, "a": "no number"} if number in numbers else row for number, row in enumerate(rows)]


@pytest.mark.slow
def test_a_row_that_cannot_be_decoded_is_named(run: Run, shards: Callable[..., Path]) -> None:
    folder = shards(".jsonl", broken(ROWS, (23,)))
    with pytest.raises(RuntimeError, match=r"Row 2 of .*part-2.jsonl cannot be decoded: a='no number'"):
        run(folder)


def test_a_row_of_the_same_split_takes_the_place_of_a_bad_one(shards: Callable[..., Path]) -> None:
    folder = shards(".jsonl", broken(ROWS, (30, 48, 60)))
    given: dict[str, Any] = {"inputs": ["a"], "val_fraction": 0.2, "on_error": "skip"}
    train, val = (Stream(str(folder), split, **given) for split in ("train", "val"))
    assert [train[30].item(), train[48].item(), val[11].item()] == [31, 40, 49]


def test_a_number_that_a_table_lacks_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "0.csv").write_text("a,label\n1,0\n2,\n3,NA\n4,1\n")
    given: dict[str, Any] = {"path": str(tmp_path), "inputs": ["a"], "targets": "label"}
    with pytest.raises(ValueError, match=r"Row 2 of .*0.csv cannot be decoded: its 'label' is 'NA', and no number"):
        Stream(**given)[2]
    assert [target for _, target in map(Stream(**given, on_error="skip").__getitem__, range(4))] == [0, 1, 1, 1]


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_text_of_a_column_that_is_none_is_left_out(suffix: str, tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"a": arrow.array([b"one", b"\xff\xfe", b"two"]).view(arrow.string())})
    if suffix == "parquet":
        parquet.write_table(table, tmp_path / "0.parquet")
    else:
        with arrow.ipc.new_file(tmp_path / "0.arrow", table.schema) as file:
            file.write_table(table)
    with pytest.raises(ValueError, match=rf"Row 1 of .*0.{suffix} cannot be decoded: .* can't decode byte 0xff"):
        Stream(str(tmp_path), inputs="a")[1]
    assert [*map(Stream(str(tmp_path), inputs="a", on_error="skip").__getitem__, range(3))] == ["one", "two", "two"]


@pytest.mark.slow
def test_rows_are_skipped_alike_on_any_number_of_ranks(run: Run, shards: Callable[..., Path]) -> None:
    folder = shards(".jsonl", broken(ROWS, (0, 19, 23, 24, 60)))
    own = (folder, "data.on_error=skip", "strategy=ddp_exact", "data.global_batch_size=12")
    found = [run(*own), run(*own, "data.num_workers=1"), run(*own, world_size=2)]
    assert len({summary["weights_sha256"] for summary in found}) == 1
    assert [summary["skipped_samples"] for summary in found] == [5, 5, 5]
    assert [summary["samples_seen"] for summary in found] == [2 * 49] * 3
    saved = json.loads((Path(found[2]["run_directory"]) / "summary.json").read_text())
    assert saved["skipped_samples"] == 5
    log = (Path(found[0]["run_directory"]) / "train.log").read_text()
    assert "part-2.jsonl cannot be decoded and is left out: a='no number'" in log
    substitutes = Stream(str(folder), inputs=["a"], on_error="skip")
    assert [substitutes[number].item() for number in (0, 19, 23, 24, 60)] == [1, 1, 25, 25, 40]
