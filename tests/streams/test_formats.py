"""Rows of shards in each format, local and compressed, are those that were written."""

from collections.abc import Callable
from pathlib import Path

import pytest

from ddp_recipes.streams import Stream
from helpers.shards import ROWS

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


def test_lines_of_a_text_are_rows(shards: Callable[..., Path]) -> None:
    stream = Stream(str(shards(".txt")), inputs="text")
    assert [stream[number] for number in range(61)] == [str(row["a"]) for row in ROWS]


def test_a_whole_row_is_a_sample(shards: Callable[..., Path]) -> None:
    assert Stream(str(shards(".jsonl")))[8] == ROWS[8]


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
