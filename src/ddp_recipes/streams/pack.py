"""A map-style data set, a folder of images or a table as shards: in parallel, and gone on with where it stopped."""

import importlib
import io
import json
import os
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ddp_recipes.config.targets import check_name
from ddp_recipes.data.order import Sequential, Shuffled
from ddp_recipes.errors import RequestError
from ddp_recipes.runtime.files import write_aside
from ddp_recipes.streams.cache import Cache
from ddp_recipes.streams.formats import needed
from ddp_recipes.streams.index import NAME, Columns, Index, Shard, assembled, described, in_parallel, write

PLAN = "pack.json"  # what is being packed, as long as it is
LOOKED_AT = 32  # samples from which the size of others is estimated
GROUP = 1 << 20  # bytes of a row group


@dataclass(frozen=True)
class Packing:
    """A data set to be written as shards.

    Attributes:
        source: a folder of images, a file, a folder of a Hugging Face set, or a dotted name.
        arguments: ``key=value`` of what the dotted name stands for.
        bytes_a_shard: about.
        seed: of the order in which samples are written; None: that of the set.
    """

    source: str
    arguments: tuple[str, ...]
    dest: Path
    bytes_a_shard: int
    seed: int | None

    @cached_property
    def samples(self) -> Any:
        """The data set: it has a length, and ``samples[i]`` is a row as it is written."""
        if (path := Path(self.source).expanduser()).exists():
            return _of_path(path)
        return _Made(made(self.source, self.arguments))

    def run(self, workers: int, show: Callable[[int, int], None]) -> Index:
        """Write what is not written yet; return the index.

        Raises:
            RequestError: the set cannot be packed, or something else is at the destination.
        """
        if not len(self.samples):
            raise RequestError(f"{self.source} has no sample to pack.")
        cuts = self._begin()
        parts = range(len(cuts) - 1)
        todo = [number for number in parts if not (self.dest / self._name(number)).exists()]
        jobs = [(self, number, cuts[number], cuts[number + 1]) for number in todo]
        for done, _ in enumerate(in_parallel(_write, jobs, workers), 1 + len(parts) - len(todo)):
            show(done, len(parts))
        cache = Cache(self.dest / ".cache")
        found: list[tuple[Shard, Columns]] = [described(str(self.dest), self._name(number), cache) for number in parts]
        index = assembled(str(self.dest), iter(found), getattr(self.samples, "more", {}))
        write(index, cache)
        (self.dest / PLAN).unlink()
        return index

    def _begin(self) -> list[int]:
        """Return where the set is cut, as the destination says if this was begun before."""
        rows = len(self.samples)
        what = {"source": self.source, "arguments": [*self.arguments], "seed": self.seed, "samples": rows,
                "bytes_a_shard": self.bytes_a_shard}  # fmt: skip
        plan = self.dest / PLAN
        if plan.exists():
            begun = json.loads(plan.read_text())
            if {**begun, "cuts": None} != {**what, "cuts": None}:
                raise RequestError(f"{self.dest} holds a part of another pack: {begun}. Give a new folder.")
            cuts: list[int] = begun["cuts"]
            return cuts
        if self.dest.exists() and any(self.dest.iterdir()):
            done = " It is packed already." if (self.dest / NAME).exists() else ""
            raise RequestError(f"{self.dest} is there and is not empty.{done} Give a new folder.")
        looked_at = np.linspace(0, rows - 1, min(rows, LOOKED_AT)).astype(int).tolist()
        size = max(1.0, float(np.mean([self.samples.size(number) for number in looked_at])))
        each = max(1, round(self.bytes_a_shard / size))
        cuts = [*range(0, rows, each), rows]
        write_aside(plan, lambda file: file.write(json.dumps({**what, "cuts": cuts}).encode()))
        return cuts

    def _name(self, number: int) -> str:
        return f"part-{number:06}{self.samples.suffix}"

    def write(self, number: int, first: int, last: int) -> None:
        """Write a shard."""
        rows = len(self.samples)
        order = Sequential(rows) if self.seed is None else Shuffled(rows, self.seed)
        numbers = order.samples(0, np.arange(first, last, dtype=np.uint64)).tolist()
        write_aside(self.dest / self._name(number), lambda file: self.samples.write(numbers, file))


def _write(packing: Packing, number: int, first: int, last: int) -> None:
    torch.set_num_threads(1)
    packing.write(number, first, last)


def made(name: str, arguments: tuple[str, ...]) -> Any:
    """Return the data set that a dotted name makes.

    Raises:
        RequestError: there is no such name, or it makes none.
    """
    check_name(name, "SOURCE")
    module, _, attribute = name.rpartition(".")
    try:
        make = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise RequestError(
            f"{name} is no path, and no dotted name of a function or class: {error}. Give a folder of images, a file, "
            f"or a name such as ddp_recipes.datasets.digits, with its arguments as key=value."
        ) from error
    pairs = [argument.partition("=") for argument in arguments]
    found = make(**{key: _parsed(value) for key, _, value in pairs})
    if not (hasattr(found, "__len__") and hasattr(found, "__getitem__")):
        raise RequestError(f"{name} makes a {type(found).__name__}, which is no map-style data set.")
    return found


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _of_path(path: Path) -> Any:
    if path.is_dir() and (path / "state.json").exists() and (path / "dataset_info.json").exists():
        return _Made(needed("datasets").load_from_disk(str(path)))
    if path.is_dir():
        return _Images(path)
    if path.suffix in (".csv", ".jsonl", ".parquet", ".arrow", ".txt"):
        from ddp_recipes.streams.dataset import Stream

        return _Made(Stream(str(path)))
    raise RequestError(f"{path} cannot be packed. Allowed: a folder of images, .csv, .jsonl, .parquet, .arrow or .txt.")


class _Images:
    """Images in a folder a class, as tar files of their bytes."""

    suffix = ".tar"

    def __init__(self, root: Path) -> None:
        from torchvision.datasets import ImageFolder

        try:
            self.folder = ImageFolder(str(root))
        except (FileNotFoundError, OSError) as error:
            raise RequestError(f"{root} has no images in folders of classes: {error}") from error
        self.more = {"classes": self.folder.classes}

    def __len__(self) -> int:
        return len(self.folder.samples)

    def size(self, number: int) -> int:
        """Return the bytes that a sample takes."""
        return os.path.getsize(self.folder.samples[number][0]) + 3 * tarfile.BLOCKSIZE

    def write(self, numbers: list[int], file: Any) -> None:
        """Write samples as a tar file."""
        with tarfile.open(fileobj=file, mode="w") as tar:
            for number in numbers:
                path, label = self.folder.samples[number]
                suffix = Path(path).suffix.lower().removeprefix(".").replace("jpeg", "jpg")
                name = suffix if suffix in ("jpg", "png", "webp", "gif") else "img"
                for kind, content in ((name, Path(path).read_bytes()), ("cls", str(label).encode())):
                    member = tarfile.TarInfo(f"{number:09}.{kind}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))


class _Made:
    """Samples of a map-style data set, as parquet files: tensors are lists whose shape is in the schema."""

    suffix = ".parquet"

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def row(self, number: int) -> dict[str, Any]:
        """Return a sample by column."""
        sample = self.dataset[number]
        if isinstance(sample, Mapping):
            return dict(sample)
        if isinstance(sample, (tuple, list)):
            names = ("inputs", "targets") if len(sample) == 2 else tuple(f"column_{at}" for at in range(len(sample)))
            return dict(zip(names, sample, strict=True))
        return {"inputs": sample}

    def size(self, number: int) -> int:
        """Return about the bytes that a sample takes."""
        return sum(_size(value) for value in self.row(number).values())

    def write(self, numbers: list[int], file: Any) -> None:
        """Write samples as a parquet file, each of whose columns has one type and shape."""
        arrow, parquet = needed("pyarrow"), needed("pyarrow.parquet")
        rows = [self.row(number) for number in numbers]
        fields, columns = [], []
        for name in rows[0]:
            try:
                field, column = _column(name, [row[name] for row in rows], arrow)
            except (arrow.ArrowInvalid, arrow.ArrowTypeError, KeyError, TypeError) as error:
                raise RequestError(f"{name} of samples {numbers[0]} to {numbers[-1]} is no column: {error}") from error
            fields.append(field)
            columns.append(column)
        table = arrow.Table.from_arrays(columns, schema=arrow.schema(fields))
        group = max(1, round(GROUP * len(rows) / max(1, table.nbytes)))
        parquet.write_table(table, file, row_group_size=group, compression="zstd")


def _size(value: Any) -> int:
    if hasattr(value, "nbytes"):
        return int(value.nbytes)
    if isinstance(value, (str, bytes, list)):
        return len(value) * (8 if isinstance(value, list) else 1)
    return int(np.asarray(value.convert("RGB")).size // 8) if hasattr(value, "convert") else 8


def _column(name: str, values: list[Any], arrow: Any) -> tuple[Any, Any]:
    """Return a column and its field; tensors of one shape become lists of fixed length."""
    first = values[0]
    if isinstance(first, torch.Tensor):
        values = [value.numpy() for value in values]
        first = values[0]
    if isinstance(first, np.ndarray) and first.ndim and all(value.shape == first.shape for value in values):
        flat = arrow.array(np.stack(values).reshape(-1))
        kind = arrow.list_(flat.type, first.size)
        column = arrow.FixedSizeListArray.from_arrays(flat, first.size)
        return arrow.field(name, kind, metadata={"shape": json.dumps(first.shape)}), column
    if isinstance(first, (np.ndarray, np.generic)):
        values = [value.item() if not value.ndim else value.ravel() for value in values]
    if hasattr(first, "convert"):  # a PIL image
        values = [_png(value) for value in values]
    column = arrow.array(values)
    return arrow.field(name, column.type), column


def _png(image: Any) -> bytes:
    content = io.BytesIO()
    image.save(content, "PNG")
    return content.getvalue()
