"""Rows, and shards of them in each format."""

import csv
import gzip
import io
import json
import tarfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROWS = [
    {"a": float(number), "b": number % 7 / 7, "y": number / 10, "text": f"row {number}\nand"} for number in range(61)
]
CUTS = (0, 20, 21, 40, 61)


def write_shards(folder: Path, suffix: str, rows: list[dict[str, Any]], cuts: tuple[int, ...] = CUTS) -> Path:
    """Write rows as shards, cut at these places, in the format and compression of a suffix."""
    folder.mkdir(parents=True)
    kind, _, compression = suffix.removeprefix(".").partition(".")
    for number, (first, last) in enumerate(pairwise(cuts)):
        content = _WRITERS[kind](rows[first:last])
        if compression:
            content = _compressed(content, compression)
        (folder / f"part-{number}{suffix}").write_bytes(content)
    return folder


def _compressed(content: bytes, compression: str) -> bytes:
    if compression == "gz":
        return gzip.compress(content)
    import zstandard

    return zstandard.compress(content)


def _parquet(rows: list[dict[str, Any]]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink, row_group_size=7)
    return sink.getvalue()


def _arrow(rows: list[dict[str, Any]]) -> bytes:
    import pyarrow as pa

    table, sink = pa.Table.from_pylist(rows), io.BytesIO()
    with (pa.ipc.new_stream if len(rows) == 1 else pa.ipc.new_file)(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=5)
    return sink.getvalue()


def _jsonl(rows: list[dict[str, Any]]) -> bytes:
    return "".join(f"{json.dumps(row)}\n{'' if number % 9 else chr(10)}" for number, row in enumerate(rows)).encode()


def _csv(rows: list[dict[str, Any]]) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, ["a", "b", "y", "text"])
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def _txt(rows: list[dict[str, Any]]) -> bytes:
    return "\n".join(str(row["a"]) for row in rows).encode()


def _tar(rows: list[dict[str, Any]]) -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as file:
        for row in rows:
            long = "folder_" * 20 if row["a"] % 3 == 1 else "folder"  # what does not fit a header has one of its own
            for name in ("a", "b", "y", "text"):
                content = json.dumps(row[name]).encode()
                member = tarfile.TarInfo(f"{long}/{int(row['a']):03}.{name}.json")
                member.size = len(content)
                file.addfile(member, io.BytesIO(content))
    return sink.getvalue()


_WRITERS = {"parquet": _parquet, "arrow": _arrow, "jsonl": _jsonl, "csv": _csv, "txt": _txt, "tar": _tar}


class Noise:
    """Adds what a sample draws at random."""

    def __call__(self, inputs: Tensor) -> Tensor:
        return inputs + torch.rand(inputs.shape)
