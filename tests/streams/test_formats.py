"""Rows of shards in each format, local and compressed, are those that were written."""

import gzip
import io
import json
import os
import re
import subprocess
import tarfile
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
import torch

from ddp_recipes.errors import RequestError
from ddp_recipes.streams import Stream
from ddp_recipes.streams.cache import Cache
from ddp_recipes.streams.columns import Parquet
from ddp_recipes.streams.csv_table import Csv
from ddp_recipes.streams.index import make
from ddp_recipes.streams.json_lines import JsonLines
from helpers.shards import ROWS, write_shards

pytest.importorskip("pyarrow")
pytest.importorskip("zstandard")


@pytest.mark.parametrize("compression", ["", ".gz", ".zst"])
@pytest.mark.parametrize("kind", [".parquet", ".arrow", ".jsonl", ".csv", ".tar"])
def test_rows_are_those_that_were_written(
    kind: str, compression: str, shards: Callable[..., Path], tmp_path: Path
) -> None:
    columns = [f"{name}.json" for name in ("a", "b", "y")] if kind == ".tar" else ["a", "b", "y"]
    stream = Stream(
        str(shards(kind + compression)),
        inputs=columns,
        targets="text.json" if kind == ".tar" else "text",
        cache={"folder": str(tmp_path / "cache")},
        memory_mb=0,
    )
    assert stream.index.rows == (20, 1, 19, 21)
    found = [stream[number] for number in range(len(stream))]
    assert [inputs.tolist() for inputs, _ in found] == [pytest.approx([row["a"], row["b"], row["y"]]) for row in ROWS]
    assert [text for _, text in found] == [row["text"] for row in ROWS]
    assert [stream[number][1] for number in (60, 3, 33, 3)] == [ROWS[number]["text"] for number in (60, 3, 33, 3)]
    assert (tmp_path / "cache").exists() == bool(compression)


def test_views_of_lists_are_read_wherever_their_numbers_lie(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    views = arrow.ListViewArray.from_arrays([3, 0, 1], [2, 2, 0], [1, 2, 3, 4, 5])
    table = arrow.table({"a": views})
    with arrow.ipc.new_file(tmp_path / "views.arrow", table.schema) as file:
        file.write_table(table)
    stream = Stream(str(tmp_path), inputs="a")
    assert [stream[number].tolist() for number in range(3)] == [[4, 5], [1, 2], []]


@pytest.mark.parametrize("kind", ["list_", "large_list"])
def test_lists_of_floats_are_as_those_of_json(kind: str, shards: Callable[..., Path]) -> None:
    """Pandas and Python write them with 64 bits, and models have 32."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [[0.1, 2.0], [0.5], [None, 1.0]]
    folder = shards(".jsonl", [{"a": row} for row in rows], (0, 3))
    table = arrow.table({"a": arrow.array(rows, getattr(arrow, kind)(arrow.float64()))})
    parquet.write_table(table, folder.parent / "0.parquet")
    of_json, of_parquet = Stream(str(folder), inputs="a"), Stream(f"{folder.parent}/0.parquet", inputs="a")
    for number in range(2):
        assert of_parquet[number].dtype == of_json[number].dtype == torch.float32
        assert of_parquet[number].tolist() == of_json[number].tolist()
    assert of_parquet[2].dtype == of_json[2].dtype == torch.float32, "one with a null"


@pytest.mark.parametrize("has_index", [False, True])
def test_numbers_of_a_json_column_are_of_one_kind_in_all_rows_and_shards(has_index: bool, tmp_path: Path) -> None:
    """Many write 1.0 as 1, and a list of none says nothing of its kind."""
    folder = tmp_path / "set"
    folder.mkdir()
    first = '{"a": 1, "n": 1, "ids": [], "box": [[1, 2]], "more": {"n": 1, "at": [1, true]}, "on": true}\n{}\nno\n'
    (folder / "0.jsonl").write_text(first)
    last = '{"a": 0.5, "n": true, "ids": [7], "box": [[0.5, null]], "more": {"at": 0.5}, "on": false, "new": "x"}\n'
    (folder / "1.jsonl").write_text(last)
    if has_index:
        make(str(folder), Cache(folder / ".cache"), 1, lambda done, total: None)
    stream = Stream(str(folder))
    one, other = stream[0], stream[3]
    assert [(row["a"], type(row["a"]), row["n"], type(row["n"])) for row in (one, other)] == [
        (1.0, float, 1, int),
        (0.5, float, 1, int),
    ]
    assert [row["ids"].dtype for row in (one, other)] == [torch.int64] * 2
    assert [row["box"].dtype for row in (one, other)] == [torch.float32] * 2
    assert (one["box"].tolist(), str(other["box"].tolist())) == ([[1.0, 2.0]], "[[0.5, nan]]")
    assert str((one["more"], one["on"])) == "({'n': 1, 'at': [1.0, 1.0]}, True)"
    assert stream.index.columns["ids"] == "whole numbers"
    with pytest.raises(RequestError, match=r"has no column 'newer'. Did you mean 'new'"):
        Stream(str(folder), inputs="newer")


def test_an_index_without_kinds_of_json_columns_is_one_still(tmp_path: Path) -> None:
    (tmp_path / "0.jsonl").write_text('{"a": 1}\n{"a": 0.5}\n')
    made = make(str(tmp_path), Cache(tmp_path / ".cache"), 1, lambda done, total: None)
    index = tmp_path / "index.json"
    index.write_text(index.read_text().replace(json.dumps(dict(made.columns)), "{}"))
    assert [type(Stream(str(tmp_path))[number]["a"]) for number in range(2)] == [int, float]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_null_among_whole_numbers_is_named(suffix: str, shards: Callable[..., Path]) -> None:
    """No whole number says that it is missing, and one of floats would be of another type than its column."""
    rows = [{"a": [1, 2]}, {"a": [3, None]}, {"a": []}, {"a": [4, 5]}]
    folder = str(shards(suffix, rows, (0, 3, 4)))
    stream, skips = Stream(folder, inputs="a"), Stream(folder, inputs="a", on_error="skip")
    with pytest.raises(ValueError, match=rf"Row 1 of .*part-0{suffix} cannot be decoded: its 'a' has a null among"):
        stream[1]
    assert [(skips[number].tolist(), skips[number].dtype) for number in range(4)] == [
        ([1, 2], torch.int64),
        ([], torch.int64),
        ([], torch.int64),
        ([4, 5], torch.int64),
    ]


def test_lists_in_lists_are_of_their_columns_type(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = {"a": [[[1, 2]], [[]], []], "b": [[[0.5], [None]], [[1.0, 2.0]], [[1.0], [2.0, 3.0]]]}
    parquet.write_table(arrow.table(rows), tmp_path / "0.parquet")
    stream = Stream(str(tmp_path))
    assert [stream[number]["a"].dtype for number in range(3)] == [torch.int64] * 3
    assert [stream[number]["b"].dtype for number in range(2)] == [torch.float32] * 2
    assert stream[2]["b"] == [[1.0], [2.0, 3.0]], "of no shape"


@pytest.mark.parametrize("axes", [(0, 1, 2), (0, 2, 1)])
def test_tensors_of_arrow_keep_their_shape(axes: tuple[int, ...], tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    tensors = np.arange(24, dtype=np.float32).reshape(2, 3, 4).transpose(axes)
    table = arrow.table({"a": arrow.FixedShapeTensorArray.from_numpy_ndarray(tensors)})
    parquet.write_table(table, tmp_path / "0.parquet")
    stream = Stream(str(tmp_path), inputs="a")
    assert [stream[number].tolist() for number in range(2)] == tensors.tolist()


def test_columns_are_the_same_whether_a_library_of_their_type_is_loaded(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

    class Kind(arrow.ExtensionType):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__(arrow.list_(arrow.int64()), "of_a_library")

        def __arrow_ext_serialize__(self) -> bytes:
            return b""

        @classmethod
        def __arrow_ext_deserialize__(cls, *_: object) -> "Kind":
            return cls()

    column = arrow.ExtensionArray.from_storage(Kind(), arrow.array([[1, 2], [3]]))
    parquet.write_table(arrow.table({"a": column}), tmp_path / "0.parquet")
    stream = Stream(str(tmp_path), inputs="a")
    arrow.register_extension_type(Kind())
    try:
        assert [stream[number].tolist() for number in range(2)] == [[1, 2], [3]]
    finally:
        arrow.unregister_extension_type("of_a_library")


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT])
def test_files_of_a_tar_that_are_of_no_sample_are_left_out(form: int, tmp_path: Path) -> None:
    """As macOS and people put them between those of samples."""
    hidden = f"{'folder_' * 30 if form == tarfile.PAX_FORMAT else 'folder'}/._1.cls"
    with tarfile.open(tmp_path / "0.tar", "w", format=form) as file:
        for name in ("README", "._1.txt", "1.txt", hidden, "1.cls", ".DS_Store", "2.txt", "2.cls", "LICENSE"):
            member = tarfile.TarInfo(name)
            member.size = 1
            file.addfile(member, io.BytesIO(b"7"))
    stream = Stream(str(tmp_path), inputs="txt", targets="cls")
    assert [stream[number] for number in range(len(stream))] == [("7", 7), ("7", 7)]
    assert Stream(str(tmp_path))[1] == {"__key__": "2", "txt": "7", "cls": 7}


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("date", [0, 1.5], ids=["", "half a second"])
def test_files_of_a_tar_are_found_whatever_headers_they_have(form: int, date: float, tmp_path: Path) -> None:
    """As ``tarfile`` finds them; webdataset writes dates of fractions, in headers of their own."""
    names = ["dör/", "dör/1.txt", f"{'folder/' * 18}1.txt", "link", f"{'long' * 30}.txt", "2.a.json", "2.cls"]
    with tarfile.open(tmp_path / "0.tar", "w", format=form) as file:
        for name in names[: -1 if form != tarfile.USTAR_FORMAT else 4]:
            member = tarfile.TarInfo(name)
            member.type = {"/": tarfile.DIRTYPE, "k": tarfile.SYMTYPE}.get(name.partition(".")[0][-1], tarfile.REGTYPE)
            member.linkname, member.mtime, member.size = "1.txt", date, int(member.isfile())
            file.addfile(member, io.BytesIO(b"7"))
    stream = Stream(str(tmp_path))
    with tarfile.open(tmp_path / "0.tar") as file:
        expected = [member.name for member in file if member.isfile()]
    rows = [stream[number] for number in range(len(stream))]
    assert [f"{row['__key__']}.{suffix}" for row in rows for suffix in row if suffix != "__key__"] == expected


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: b"x" + content[1:], "it is no tar file: bad checksum"),
        (lambda content: content[:4100] + b"x" + content[4101:], "damaged or cut short: byte 4,096 begins no header"),
        (lambda content: content[:4100], "it is damaged or cut short: byte 4,096 begins no header"),
        (lambda content: content[:4700], "it is cut short: "),
        (lambda content: content[:5000].rstrip(b"\0"), "it is cut short: "),
    ],
    ids=["first header", "header", "cut in a header", "cut in a file", "no last block"],
)
def test_a_tar_that_is_damaged_is_named(damage: Callable[[bytes], bytes], message: str, tmp_path: Path) -> None:
    """``tarfile`` takes a header that is none for the end: rows were lost without a word."""
    with tarfile.open(tmp_path / "0.tar", "w", format=tarfile.USTAR_FORMAT) as file:
        for number in range(8):
            member = tarfile.TarInfo(f"{number}.txt")
            member.size = 400
            file.addfile(member, io.BytesIO(b"7" * 400))
    content = (tmp_path / "0.tar").read_bytes()
    (tmp_path / "0.tar").write_bytes(damage(content))
    with pytest.raises(RequestError, match=rf"0.tar cannot be read: .*{message}"):
        Stream(str(tmp_path))


@pytest.mark.parametrize("form", ["gnu", "posix"])
def test_a_file_with_holes_is_read_from_a_tar(form: str, tmp_path: Path) -> None:
    with (tmp_path / "a.bin").open("wb") as file:
        file.truncate(1 << 20)
        file.write(b"begins")
    command = ["tar", "--sparse", f"--format={form}", "-cf", "set.tar", "a.bin"]
    subprocess.run(command, cwd=tmp_path, check=True)
    assert Stream(str(tmp_path / "set.tar"), inputs="bin")[0] == b"begins".ljust(1 << 20, b"\0")


def test_lines_of_a_text_are_rows(shards: Callable[..., Path]) -> None:
    stream = Stream(str(shards(".txt")), inputs="text")
    assert [stream[number] for number in range(61)] == [str(row["a"]) for row in ROWS]


TABLE = 'name,size\n"two ""x""\ny",1\n{}1_000,3\n"a, b",4\n"",5\n'


@pytest.mark.parametrize(
    ("inside", "rows"),
    [
        ("", []),
        ('5" pipe,2\n', [('5" pipe', 2)]),
        ('5" pipe,2\nand 6" one,2\n', [('5" pipe', 2), ('and 6" one', 2)]),
        (' "so,2\n', [(' "so', 2)]),
    ],
    ids=["none", "one", "two", "after a space"],
)
def test_a_quote_within_a_field_is_a_part_of_it(inside: str, rows: list[tuple[str, int]], tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text("\ufeff" + TABLE.format(inside))
    stream = Stream(str(tmp_path))
    found = [tuple(stream[number].values()) for number in range(len(stream))]
    assert found == [('two "x"\ny', 1), *rows, ("1_000", 3), ("a, b", 4), ("", 5)]


def test_a_long_text_is_a_field(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text(f"text,size\n{'long ' * 30_000},1\n")
    assert Stream(str(tmp_path), inputs="text")[0] == "long " * 30_000


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_numbers_for_validation_are_of_the_kinds_of_those_for_training(suffix: str, tmp_path: Path) -> None:
    """A run failed in its first validation, of whole numbers by chance."""
    for name, number in {"train": 1.5, "val": 1}.items():
        (tmp_path / name).mkdir()
        row = f'{{"a": {number}}}' if suffix == "jsonl" else f"a\n{number}"
        (tmp_path / name / f"0.{suffix}").write_text(row)
    stream = Stream(str(tmp_path / "train"), "val", val_path=str(tmp_path / "val"), inputs="a")
    assert (stream[0], type(stream[0])) == (1.0, float)
    alone = Stream(str(tmp_path / "nowhere"), "val", val_path=str(tmp_path / "val"), inputs="a")
    assert type(alone[0]) is int, "the set for training may be elsewhere"


@pytest.mark.parametrize("has_index", [False, True])
def test_a_column_of_a_csv_file_has_one_type(has_index: bool, tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "0.csv").write_text("title,count,price\n1984,1,2\n300,NA,3\n\nwrong\n")
    (folder / "1.csv").write_text("title,count,price\nThe Hours,4,\nIt,5,1e-1\n")
    if has_index:
        make(str(folder), Cache(folder / ".cache"), 1, lambda done, total: None)
    stream = Stream(str(folder), on_error="skip")
    rows = [("1984", 1, 2.0), ("300", "NA", 3.0), ("1984", 1, 2.0), ("The Hours", 4, ""), ("It", 5, 0.1)]
    found = [tuple(stream[number].values()) for number in range(5)]
    assert (found, [*map(type, found[1])]) == (rows, [str, str, float])
    assert stream.index.columns == {"title": "texts", "count": "whole numbers", "price": "numbers"}
    assert Stream(str(folder), inputs=["title", "price"])[1].tolist() == [300, 3], "a vector is one of numbers"


def test_blank_lines_before_a_csv_files_first_one_are_none(tmp_path: Path) -> None:
    (tmp_path / "0.csv").write_text('\ufeff\n\r\n"a",b\n1,"x\ny"\n')
    assert Stream(str(tmp_path))[0] == {"a": 1, "b": "x\ny"}


def test_numbers_of_a_database_are_numbers(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"price": [Decimal("1.50"), Decimal("2.25")], "id": arrow.array([1, 2**63], arrow.uint64())})
    parquet.write_table(table, tmp_path / "0.parquet")
    stream = Stream(str(tmp_path), inputs="price")
    assert [(stream[number], type(stream[number])) for number in range(2)] == [(1.5, float), (2.25, float)]
    assert Stream(str(tmp_path), inputs=["id", "price"])[1].tolist() == [2.0**63, 2.25]
    with pytest.raises(ValueError, match=r"Row 1 of .* its 'id' is 9223372036854775808, and whole numbers have 64"):
        Stream(str(tmp_path), inputs="id")[1]


def test_numbers_that_are_encoded_by_their_runs_are_read(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    table = arrow.table({"a": arrow.RunEndEncodedArray.from_arrays([2, 3], [7, 9])})
    with arrow.ipc.new_file(tmp_path / "0.arrow", table.schema) as file:
        file.write_table(table)
    assert [Stream(str(tmp_path), inputs="a")[number] for number in range(3)] == [7, 7, 9]


def test_columns_of_a_csv_file_may_come_in_another_order(tmp_path: Path) -> None:
    (tmp_path / "0.csv").write_text("a,b\n1,x\n")
    (tmp_path / "1.csv").write_text("b,a\ny,0.5\n")
    stream = Stream(str(tmp_path))
    assert [(stream[number]["a"], stream[number]["b"]) for number in range(2)] == [(1.0, "x"), (0.5, "y")]


def test_an_index_without_types_of_csv_columns_is_one_still(tmp_path: Path) -> None:
    (tmp_path / "0.csv").write_text("title,count\n1984,1\nIt,2.5\n")
    make(str(tmp_path), Cache(tmp_path / ".cache"), 1, lambda done, total: None)
    index = tmp_path / "index.json"
    index.write_text(re.sub("texts|numbers", "text", index.read_text()))
    assert [*Stream(str(tmp_path))[0].values()] == [1984, 1]


def test_texts_have_neither_mark_nor_blank_lines(tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_text("\ufeffone\n \n\ntwo \n\n")
    stream = Stream(str(tmp_path), inputs="text")
    assert [stream[number] for number in range(len(stream))] == ["one", "two "]


@pytest.mark.parametrize(
    "content", ['  \n{{"a": 1}}{0}\n\t \r\n\f\n{{"a": 2}}{0}\n   ', '{{"a": 1}}{0}\r\n\r\r\n {{"a": 2}}']
)
def test_blank_lines_are_no_rows_of_json(content: str, tmp_path: Path) -> None:
    (tmp_path / "lines.jsonl").write_text(content.format("  "), newline="")
    stream = Stream(str(tmp_path), inputs="a")
    assert [stream[number] for number in range(len(stream))] == [1, 2]


def test_a_whole_row_is_a_sample(shards: Callable[..., Path]) -> None:
    assert Stream(str(shards(".jsonl")))[8] == ROWS[8]


def test_suffixes_of_shards_are_of_any_case(tmp_path: Path) -> None:
    (tmp_path / "A.JSONL.GZ").write_bytes(gzip.compress(b'{"a": 1}'))
    (tmp_path / "B.Jsonl").write_bytes(b'{"a": 2}')
    stream = Stream(str(tmp_path), inputs="a", cache={"folder": str(tmp_path / "cache")})
    assert [stream[number] for number in range(len(stream))] == [1, 2], "the first one was no shard of the set"


def test_parts_of_a_set_are_rows_of_it(shards: Callable[..., Path]) -> None:
    folder = shards(".jsonl")
    whole, one = Stream(str(folder), inputs="a"), Stream(f"{folder}/part-2.jsonl", inputs="a")
    some = Stream(f"{folder}/part-[12].jsonl", inputs="a")
    assert [one[0], some[0], some[1]] == [whole[21], whole[20], whole[21]]
    assert [len(each) for each in (whole, one, some)] == [61, 19, 20]
    train, val = (Stream(str(folder), split, inputs="a", val_fraction=0.5) for split in ("train", "val"))
    assert [train[0], train[30], val[0], val[29]] == [0, 30, 31, 60]
    order = val.sample_order(1, True)
    assert len(order) == len(val) == 30


def test_what_a_job_that_writes_a_set_has_beside_it_is_none_of_it(shards: Callable[..., Path]) -> None:
    folder = shards(".jsonl")
    for name in ("_temporary/0/part-0.jsonl", ".part-0.jsonl.crc", "_SUCCESS"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((folder / "part-0.jsonl").read_bytes())
    assert len(Stream(str(folder))) == 61


def test_links_to_folders_and_shards_are_followed(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.txt").write_text(name)
    (tmp_path / "one" / "more").symlink_to(tmp_path / "two")
    (tmp_path / "one" / "a_link_to_itself").symlink_to(tmp_path / "one")
    (tmp_path / "one" / "newest").symlink_to(tmp_path / "one" / "more")
    (tmp_path / "one" / ".#lock.txt").symlink_to("nowhere")
    for path, names in (("one", ["more/two.txt", "one.txt"]), ("one/*/*.txt", ["more/two.txt"])):
        assert [shard.name for shard in Stream(str(tmp_path / path)).index.shards] == names
    (tmp_path / "one" / "lost.txt").symlink_to("nowhere")
    with pytest.raises(RequestError, match=r"one cannot be read: .*lost.txt: No such file"):
        Stream(str(tmp_path / "one"))


def test_a_pattern_means_what_it_means_to_a_shell(shards: Callable[..., Path]) -> None:
    folder = shards(".jsonl")
    write_shards(folder / "more", ".jsonl", ROWS[:3], (0, 3))
    (folder / "part-[x].jsonl").write_bytes((folder / "part-2.jsonl").read_bytes())
    rows = {"*.jsonl": 61 + 19, "m*/*.jsonl": 3, "part-[x].jsonl": 19, "../**/part-0.jsonl": 20 + 3}
    rows |= {"part-{2..0}.jsonl": 20 + 1 + 19, "part-{0..2}.jsonl": 40, "{more/,}part-0.jsonl": 3 + 20}
    rows |= {"{more,less}/part-*.jsonl": 3}
    assert {pattern: len(Stream(f"{folder}/{pattern}", inputs="a")) for pattern in rows} == rows
    (folder / "part-[x].jsonl").unlink()
    write_shards(folder.parent / "set [1]" / "more", ".jsonl", ROWS[:3], (0, 3))
    assert len(Stream(f"{folder.parent}/set [1]/*/part-{{0..0}}.jsonl")) == 3, "a folder is meant that has that name"
    make(str(folder), Cache(folder / ".cache"), 1, lambda done, total: None)
    assert len(Stream(f"{folder}/part-{{0..2}}.jsonl", inputs="a")) == 40
    for pattern, missing in {"part-{1..9}.jsonl": r"shard part-4\.jsonl", "x*": "such shard"}.items():
        with pytest.raises(RequestError, match=rf"index\.json has no {missing}\."):
            Stream(f"{folder}/{pattern}", inputs="a")


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_of_many_small_shards_each_is_read_once(
    suffix: str, shards: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of parquet files in the order of an epoch, whose windows lie in more than are open otherwise."""
    read: list[object] = []
    reads = {".jsonl": (JsonLines, "scan"), ".csv": (Csv, "scan"), ".parquet": (Parquet, "read_group")}
    folder = shards(suffix, [{**ROWS[0], "a": float(number)} for number in range(122)], tuple(range(0, 123, 2)))
    stream = Stream(str(folder), inputs=["a"], window=120)
    kind, name = reads[suffix]
    own = getattr(kind, name)
    monkeypatch.setattr(kind, name, lambda self, *given: read.append(self) or own(self, *given))
    order = np.random.default_rng(0).permutation(122) if suffix != ".parquet" else np.arange(122)
    if suffix == ".parquet":
        order = stream.sample_order(0, True).samples(0, order.astype(np.uint64))
    assert sorted(stream[int(number)].item() for number in order) == [*range(122)]
    assert len(read) == 61


def resident() -> int:
    """Return the bytes of this process that are in memory, with those of files that it maps."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


@pytest.mark.parametrize("suffix", ["tar", "txt"])
def test_what_is_read_of_a_set_is_no_memory_of_the_process(suffix: str, tmp_path: Path) -> None:
    """But for parquet's row groups and Arrow's columns: nothing of a file stays mapped."""
    content, rows = b"x" * (1 << 20), 48
    for part in range(3):
        path = tmp_path / f"part-{part}.{suffix}"
        if suffix == "txt":
            path.write_bytes((content[:-1] + b"\n") * (rows // 3))
            continue
        with tarfile.open(path, "w") as file:
            for number in range(rows // 3):
                member = tarfile.TarInfo(f"{number:03}.bin")
                member.size = len(content)
                file.addfile(member, io.BytesIO(content))
    stream = Stream(str(tmp_path))
    assert len(stream) == rows
    len(stream[0])
    before = resident()
    for number in range(rows):
        stream[number]
    assert resident() - before < 8 << 20


def test_a_file_that_is_cut_short_while_it_is_read_is_named(shards: Callable[..., Path]) -> None:
    path = shards(".jsonl")
    stream = Stream(str(path))
    assert stream[0]
    file = sorted(path.glob("*.jsonl"))[0]
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(RuntimeError, match=rf"{file.name} cannot be read: it was cut short while it was read"):
        stream[stream.index.rows[0] - 1]
