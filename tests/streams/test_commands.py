"""``ddp-recipes pack`` and ``ddp-recipes index``."""

import io
import json
import os
import signal
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from shutil import copytree

import pytest
import torch
from PIL import Image
from streams.pack_parts import Ten

from ddp_recipes.datasets import digits, image_folder
from ddp_recipes.errors import RequestError
from ddp_recipes.streams import Stream
from ddp_recipes.streams.commands import index, pack
from helpers.checkpoints import mounted
from helpers.patience import patience
from helpers.processes import COLD, GONE_S, START_S, started, until

pytest.importorskip("pyarrow")

DIGITS = "ddp_recipes.datasets.digits"


def test_a_data_set_comes_back_as_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pack([DIGITS, str(tmp_path / "set"), "split=val", "--shard-mb=0.02", "--workers=1"])
    assert f"{tmp_path / 'set'}: 360 rows in 5 shard(s)" in capsys.readouterr().out
    stream, expected = Stream(str(tmp_path / "set"), inputs="inputs", targets="targets"), digits("val")
    assert len(stream) == len(expected)
    for (inputs, target), number in zip((stream[number] for number in range(360)), range(360), strict=True):
        assert torch.equal(inputs, expected[number][0])
        assert inputs.dtype == expected[number][0].dtype
        assert target == expected[number][1]


def test_an_interrupted_pack_goes_on(tmp_path: Path) -> None:
    arguments = [DIGITS, str(tmp_path / "set"), "split=val", "--shard-mb=0.02", "--workers=1", "--shuffle=3"]
    pack([*arguments[:1], str(tmp_path / "whole"), *arguments[2:]])
    assert not (tmp_path / "whole" / ".pack.lock").exists()
    whole = {file.name: file.read_bytes() for file in (tmp_path / "whole").glob("*.parquet")}
    pack(arguments)
    plan = (
        f'{{"source": "{DIGITS}", "arguments": ["split=val"], "seed": 3, "samples": 360, "bytes_a_shard": 20000, '
        f'"cuts": [0, 76, 152, 228, 304, 360]}}'
    )
    folder = tmp_path / "set"
    (folder / "index.json").unlink()
    (folder / "pack.json").write_text(plan)  # as a process leaves it that was killed
    (folder / "part-000003.parquet").unlink()
    (folder / ".pack.lock").touch()
    kept = (folder / "part-000001.parquet").stat().st_mtime_ns
    with pytest.raises(RequestError, match="holds a part of another pack"):
        pack([*arguments[:-1], "--shuffle=4"])
    pack(arguments)
    assert {file.name: file.read_bytes() for file in folder.glob("*.parquet")} == whole
    assert (folder / "part-000001.parquet").stat().st_mtime_ns == kept
    assert not (folder / "pack.json").exists()
    with pytest.raises(RequestError, match=r"is not empty. It is packed already. Give a new folder"):
        pack(arguments)


def test_a_pack_whose_disk_is_full_goes_on_once_there_is_space(tmp_path: Path) -> None:
    arguments = [DIGITS, str(tmp_path / "small" / "set"), "split=val", "--shard-mb=0.02", "--workers=1"]
    with mounted(tmp_path / "small", "24k") as folder:
        with pytest.raises(RequestError, match=r"There is no space left in .*small/set. Free some, or copy it to a"):
            pack(arguments)
        copytree(folder / "set", tmp_path / "set")
    pack([DIGITS, str(tmp_path / "set"), *arguments[2:]])
    assert len(Stream(str(tmp_path / "set"))) == 360


def test_a_pack_of_a_file_that_has_changed_does_not_go_on(tmp_path: Path) -> None:
    """Rows of both were in one set."""
    source, arguments = tmp_path / "rows.jsonl", [str(tmp_path / "rows.jsonl"), str(tmp_path / "set")]
    arguments += ["--shard-mb=0.0001", "--workers=1"]
    lines = [f'{{"text": "line {number}"}}\n' for number in range(99)]
    source.write_text("".join([*lines[:49], '{"text"\n', *lines[50:]]))
    with pytest.raises(ValueError, match=r"Row 49 of .* cannot be decoded"):
        pack(arguments)
    assert (tmp_path / "set" / "part-000000.parquet").exists()
    source.write_text("".join(lines).replace("line", "other"))
    with pytest.raises(RequestError, match=r"rows.jsonl has changed since a part of it was packed to .*set. Give a"):
        pack(arguments)


@pytest.mark.parametrize("megabytes", ["0.00004", "100"])
def test_samples_of_any_length_keep_shape_and_type(megabytes: str, tmp_path: Path) -> None:
    pack(["streams.pack_parts.Ten", str(tmp_path / "set"), f"--shard-mb={megabytes}", "--workers=1"])
    stream = Stream(str(tmp_path / "set"))
    assert len(stream.index.shards) == (10 if megabytes != "100" else 1)
    for number in range(10):
        found, expected = stream[number], Ten()[number]
        torch.testing.assert_close(found["tokens"], expected["tokens"], rtol=0, atol=0)
        torch.testing.assert_close(found["points"], torch.from_numpy(expected["points"]), rtol=0, atol=0)
        assert found["label"] == expected["label"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Missing", "Sample 7 has x, and sample 0 x, label: each is a column, which all samples have to have."),
        (
            "OtherShapes",
            r"inputs of sample . is \[3, ., 5\], and others are \[-1, 1, 5\] \(-1: any\): the first size may",
        ),
        ("LateShape", r"inputs of sample 50 is \[4\], and others are \[3\]"),
        ("LateKind", r"targets of samples .* is no column: .*fifty"),
        ("Bfloat", r"inputs of samples 0 to 9 is no column: .*bfloat16"),
        ("Sparse", r"inputs of samples 0 to 9 is no column: .* Use Tensor.to_dense"),
        ("Large", r"inputs of samples 0 to 9 is no column: whole numbers have 64 bits: from -9223372036854775808 to "),
        ("Depths", r"inputs of samples 0 to 9 is no column: images are read in RGB, .* has mode F. Give its array"),
    ],
)
def test_samples_that_are_no_table_are_refused_by_name(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=message):
        pack([f"streams.pack_parts.{name}", str(tmp_path / "set"), "--shard-mb=0.0001", "--workers=1"])


def test_files_and_a_set_of_hugging_face_are_packed(tmp_path: Path) -> None:
    rows = [{"text": f"line {number}", "label": number % 3, "score": number / 2} for number in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rows.csv").write_text(
        "text,label,score\n" + "".join("{text},{label},{score}\n".format(**r) for r in rows)
    )
    sources = ["rows.jsonl", "rows.csv"]
    if find_spec("datasets") is not None:
        from datasets import Dataset

        Dataset.from_list(rows).save_to_disk(str(tmp_path / "hugging_face"))
        sources.append("hugging_face")
    for source in sources:
        pack([str(tmp_path / source), str(tmp_path / f"set_{source}"), "--shard-mb=0.0002", "--workers=1"])
        stream = Stream(str(tmp_path / f"set_{source}"))
        assert len(stream.index.shards) > 1, source
        assert [stream[number] for number in range(20)] == rows, source


def test_a_file_is_packed_with_its_nulls_and_bytes(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    image = io.BytesIO()
    Image.new("RGB", (40, 30), (9, 0, 0)).save(image, "JPEG")
    pictures = [{"bytes": image.getvalue(), "path": "1.jpg"}, {"bytes": image.getvalue(), "path": None}]
    notes, boxes, tags = [None, "blurred"], [[1.5, 2.0], None], [["x"], []]
    table = arrow.table({"note": notes, "picture": pictures, "box": boxes, "tags": tags})
    parquet.write_table(table, tmp_path / "rows.parquet")
    (tmp_path / "rows.jsonl").write_text(
        '{"note": null, "box": [1.5, 2.0], "tags": ["x"]}\n{"note": "blurred", "box": null, "tags": []}\n'
    )
    for source in ("rows.parquet", "rows.jsonl"):
        dest = tmp_path / f"set_{source}"
        pack([str(tmp_path / source), str(dest), "--workers=1"])
        found = parquet.read_table(dest / "part-000000.parquet")
        assert found.to_pydict() == table.select(found.column_names).to_pydict(), source
        assert [Stream(str(dest), inputs="tags")[number] for number in range(2)] == [["x"], []], "the last was a tensor"
    (tmp_path / "rows.csv").write_text("name,age\nIda,\n7,35\n")
    pack([str(tmp_path / "rows.csv"), str(tmp_path / "set_rows.csv"), "--workers=1"])
    found = parquet.read_table(tmp_path / "set_rows.csv" / "part-000000.parquet")
    assert found.to_pydict() == {"name": ["Ida", "7"], "age": [None, 35]}
    assert Stream(str(tmp_path / "set_rows.parquet"), inputs="picture")[1].shape == (3, 30, 40)


def test_images_are_packed_as_they_are(tmp_path: Path) -> None:
    for number in range(6):
        folder = tmp_path / "images" / ("bee" if number % 2 else "ant")
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 10), (40 * number, 0, 9)).save(folder / f"{number}.png")
    pack([str(tmp_path / "images"), str(tmp_path / "set"), "--workers=1"])
    stream = Stream(str(tmp_path / "set"), inputs="png", targets="cls")
    assert stream.index.more == {"classes": ["ant", "bee"]}
    found = [stream[number] for number in range(6)]
    order = [{0: 0, 2: 1, 4: 2, 1: 3, 3: 4, 5: 5}[int(image[0, 0, 0]) // 40] for image, _ in found]
    assert sorted(order) == [*range(6)] != order, "not class by class"
    assert [target for _, target in found] == [number // 3 for number in order]
    assert found[0][0].shape == (3, 10, 20)
    resized = Stream(str(tmp_path / "set"), inputs="png", targets="cls", image_size=8)
    (tmp_path / "images").rename(tmp_path / "train")
    expected = image_folder(tmp_path, image_size=8)
    assert all(torch.equal(resized[at][0], expected[number][0]) for at, number in enumerate(order)), (
        "as data=image_folder has them"
    )


def test_rows_in_the_order_of_their_targets_are_not_cut_for_validation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"id": number, "x": number % 5, "kind": "ant" if number < 30 else "bee"} for number in range(60)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pack([str(tmp_path / "rows.jsonl"), str(tmp_path / "set"), "--workers=1"])
    assert "Rows are in the order of id, kind: " in capsys.readouterr().out
    given = {"inputs": ["x"], "targets": "kind"}
    for split in ("train", "val"):
        with pytest.raises(RequestError, match=r"was packed in the order of 'kind': .* Pack it with --shuffle SEED"):
            Stream(str(tmp_path / "set"), split, val_fraction=0.1, **given)
    assert len(Stream(str(tmp_path / "set"), "train", **given)) == 60
    assert len(Stream(str(tmp_path / "set"), "val", val_path=str(tmp_path / "set"), val_fraction=0.1, **given)) == 60
    assert len(Stream(str(tmp_path / "set"), "train", val_fraction=0.1, inputs="x", targets="x")) == 54
    pack([str(tmp_path / "rows.jsonl"), str(tmp_path / "shuffled"), "--workers=1", "--shuffle=1"])
    assert len(Stream(str(tmp_path / "shuffled"), "train", val_fraction=0.1, **given)) == 54


def test_images_of_hugging_face_are_packed_as_they_lie(tmp_path: Path) -> None:
    datasets, parquet = pytest.importorskip("datasets"), pytest.importorskip("pyarrow.parquet")
    content = io.BytesIO()
    Image.new("RGB", (40, 30), (9, 0, 0)).save(content, "JPEG")
    (tmp_path / "on_disk.jpg").write_bytes(content.getvalue())
    inside, on_disk = {"bytes": content.getvalue(), "path": None}, {"bytes": None, "path": f"{tmp_path}/on_disk.jpg"}
    rows = [{"image": inside, "pages": [inside], "near": 0.5}, {"image": on_disk, "pages": [], "near": None}]
    kinds = {"image": datasets.Image(), "pages": datasets.List(datasets.Image()), "near": datasets.Value("float32")}
    made = datasets.Dataset.from_list(rows * 3, features=datasets.Features(kinds)).select([1, 2, 4])
    made.save_to_disk(str(tmp_path / "hugging_face"))
    pack([str(tmp_path / "hugging_face"), str(tmp_path / "set"), "--workers=1"])
    found = parquet.read_table(tmp_path / "set" / "part-000000.parquet").to_pylist()
    assert [row["image"]["bytes"] for row in found] == [content.getvalue()] * 3
    assert [[page["bytes"] for page in row["pages"]] for row in found] == [
        [],
        [content.getvalue()],
        [content.getvalue()],
    ]
    assert [row["near"] for row in found] == [None, 0.5, 0.5]
    stream = Stream(str(tmp_path / "set"), inputs="image")
    assert stream[0].shape == (3, 30, 40)
    assert stream.index.columns["near"] == "float"


def test_images_of_several_formats_are_one_column(tmp_path: Path) -> None:
    for number, suffix in enumerate(("png", "bmp", "tif", "webp", "PNG", "ppm")):
        folder = tmp_path / "images" / "bee"
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4), (40 * number, 0, 9)).save(folder / f"{number}.{suffix}", lossless=True)
    pack([str(tmp_path / "images"), str(tmp_path / "set"), "--workers=1"])
    stream = Stream(str(tmp_path / "set"), inputs="img", targets="cls")
    assert sorted(stream[number][0][:, 0, 0].tolist() for number in range(6)) == [[40 * n, 0, 9] for n in range(6)]


def test_images_in_colours_that_png_has_not_are_packed_in_rgb(tmp_path: Path) -> None:
    pack(["streams.pack_parts.Printed", str(tmp_path / "set"), "--workers=1"])
    assert Stream(str(tmp_path / "set"), inputs="inputs")[3][:, 0, 0].tolist() == [255, 0, 255]


def test_index_says_how_windows_shuffle(shards: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    folder = shards(".jsonl")
    index([str(folder), "--workers=1", "--batch=8"])
    output = capsys.readouterr().out
    assert f"{folder}: 61 rows in 4 shard(s)" in output
    assert "A full shuffle: displacement 1, correlation 0, variance of batches of 8 1." in output
    assert Stream(str(folder)).index.shards[2].sha256 is not None


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "mixed.jsonl").write_text('{"a": 1.5}\n{"a": "no"}\n')
    for name in ("hub/dataset_dict.json", "hub/train/state.json", "hub/test/state.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    for arguments, message in (
        (["nowhere.at_all", str(tmp_path / "x")], "nowhere.at_all is no path, and no dotted name"),
        (["ddp_recipes.datasets.balanced", str(tmp_path / "x"), "dataset=3"], "has no targets"),
        ([str(tmp_path), str(tmp_path / "x")], "has no images in folders of classes"),
        ([str(tmp_path / "hub"), str(tmp_path / "x")], "hub holds several sets .*: .*hub/test, .*hub/train"),
        (["streams.pack_parts.several", str(tmp_path / "x")], "dict is no data set, but holds 2 by name: train, test"),
        ([DIGITS], "the following arguments are required: dest. usage:"),
        ([DIGITS, str(tmp_path / "x"), "train"], "'train' is no argument. Allowed: key=value"),
        ([DIGITS, str(tmp_path / "x"), "--shard-mb=0"], "--shard-mb 0 is not allowed. Allowed: a number above 0"),
        ([DIGITS, str(tmp_path / "x"), "--shard-mb=nan"], "--shard-mb nan is not allowed"),
        ([DIGITS, str(tmp_path / "file" / "x")], "file/x cannot be written: Not a directory. Give a new folder"),
        ([str(tmp_path / "mixed.jsonl"), str(tmp_path / "y"), "--workers=1"], "a of samples 0 to 1 is no column"),
    ):
        with pytest.raises(RequestError, match=message):
            pack(arguments)
    with pytest.raises(RequestError, match="there is no folder"):
        index([str(tmp_path / "nowhere")])
    with pytest.raises(RequestError, match="'anon' is no argument"):
        index([str(tmp_path), "anon"])


def test_what_other_processes_cannot_be_given_is_packed_by_one(tmp_path: Path) -> None:
    pack(["streams.pack_parts.Unsendable", str(tmp_path / "set"), "--shard-mb=0.00003", "--workers=2"])
    assert len([*tmp_path.glob("set/part-*.parquet")]) > 1
    stream = Stream(str(tmp_path / "set"), inputs="x")
    assert [stream[number] for number in range(10)] == [2 * number for number in range(10)]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_pack_that_is_ended_ends_with_its_workers(number: signal.Signals, tmp_path: Path) -> None:
    """And while it goes on, no other one writes into its folder."""
    (tmp_path / "held").mkdir()
    given = [
        "pack",
        "streams.pack_parts.Held",
        "set",
        f"folder={tmp_path / 'held'}",
        "--shard-mb=0.00003",
        "--workers=2",
    ]
    environ = {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.getenv("PYTHONPATH")])])
    }
    with started(tmp_path, *given, command=COLD, environ=environ) as run:
        until(lambda: len([*(tmp_path / "held").iterdir()]) == 2, START_S, "no worker begins")
        with pytest.raises(
            RequestError, match=r"set is being written by another pack. Wait for its end, or give a new"
        ):
            pack([DIGITS, str(tmp_path / "set")])
        run.signal(number)
        assert run.end(GONE_S).status == (130 if number == signal.SIGINT else -number)


@pytest.mark.slow
def test_commands_work_in_parallel(python: str, shards: Callable[..., Path], tmp_path: Path) -> None:
    def ran(*arguments: str) -> str:
        command = [python, "-m", "ddp_recipes", *arguments, "--workers=2"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=patience(120))
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "1,797 rows in 5 shard(s)" in ran("pack", DIGITS, "digits", "split=all", "--shard-mb=0.1")
    assert "61 rows in 4 shard(s)" in ran("index", str(shards(".tar")))
