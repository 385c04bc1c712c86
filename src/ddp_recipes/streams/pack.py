"""A map-style data set, a folder of images or a table as shards: in parallel, and gone on with where it stopped."""

import errno
import fcntl
import importlib
import io
import json
import logging
import os
import pickle
import sys
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from ddp_recipes.config.targets import check_name
from ddp_recipes.data.loader import size_of
from ddp_recipes.data.order import Sequential, Shuffled
from ddp_recipes.datasets.images import in_rgb
from ddp_recipes.errors import RequestError
from ddp_recipes.runtime.files import write_aside
from ddp_recipes.streams.cache import Cache, locked
from ddp_recipes.streams.decoding import WHOLE_NUMBERS, Decoder, as_tensor
from ddp_recipes.streams.formats import format_of
from ddp_recipes.streams.index import (
    IN_ORDER_OF,
    NAME,
    Columns,
    Index,
    Shard,
    assembled,
    described,
    files_in,
    in_parallel,
    write,
)
from ddp_recipes.streams.reader import Row, needed

log = logging.getLogger(__name__)

PLAN = "pack.json"  # what is being packed, as long as it is
ALONE = ".pack.lock"
LOOKED_AT = 32  # samples that say how large others are, and of which type
GROUP = 1 << 20  # bytes of a row group


@dataclass(frozen=True)
class Packing:
    """A data set to be written as shards.

    Attributes:
        source: a folder of images, a file, a folder of a Hugging Face set, or a dotted name.
        arguments: ``key=value`` of what the dotted name stands for.
        bytes_a_shard: about.
        seed: of the order in which samples are written; None: that of the set, if it is one.
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
        return _of_rows(made(self.source, self.arguments))

    def run(self, workers: int, show: Callable[[int, int], None]) -> Index:
        """Write what is not written yet; return the index.

        Raises:
            RequestError: the set cannot be packed, or something else is at the destination.
        """
        if not len(self.samples):
            raise RequestError(f"{self.source} has no sample to pack.")
        with self._alone():
            return self._run(workers, show)

    def _run(self, workers: int, show: Callable[[int, int], None]) -> Index:
        try:
            cuts = self._begin()
        except OSError as error:
            raise RequestError(f"{self.dest} cannot be written: {error.strerror}. Give a new folder.") from error
        parts = range(len(cuts) - 1)
        todo = [number for number in parts if not (self.dest / self._name(number)).exists()]
        jobs = [(self, number, cuts[number], cuts[number + 1]) for number in todo]
        workers = workers if workers == 1 or self._can_be_sent() else 1
        for done, _ in enumerate(in_parallel(_write, jobs, workers), 1 + len(parts) - len(todo)):
            show(done, len(parts))
        cache = Cache(self.dest / ".cache")
        found: list[tuple[Shard, Columns]] = [described(str(self.dest), self._name(number), cache) for number in parts]
        index = assembled(str(self.dest), iter(found), self._more())
        write(index, cache)
        (self.dest / PLAN).unlink()
        return index

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Have the destination, unless another process has it, or its file system has no locks."""
        with ExitStack() as held:
            try:
                held.enter_context(locked(self.dest / ALONE, fcntl.LOCK_EX | fcntl.LOCK_NB))
                held.callback((self.dest / ALONE).unlink)
            except BlockingIOError as error:
                raise RequestError(
                    f"{self.dest} is being written by another pack. Wait for its end, or give a new folder."
                ) from error
            except OSError as error:
                log.debug("%s is not locked: %s", self.dest, error)
            yield

    def _can_be_sent(self) -> bool:
        """Whether other processes can be given the data set: if each made its own, samples might be others."""
        try:
            with open(os.devnull, "wb") as nowhere:
                pickle.dump(self, nowhere)
        except Exception as error:  # noqa: BLE001 - what cannot be pickled raises anything
            log.warning("This process alone writes all shards, for others cannot be given the data set: %s", error)
            return False
        return True

    @property
    def _seed(self) -> int | None:
        found: int | None = self.samples.seed if self.seed is None else self.seed
        return found

    def _more(self) -> Mapping[str, Any]:
        """Return what the index says beside: also in the order of which columns the rows are."""
        more: Mapping[str, Any] = self.samples.more
        if self._seed is not None:
            return more
        rows = [self.samples.row(number) for number in looked_at(len(self.samples))]
        sorted_by = [name for name in rows[0] if _is_sorted([_plain(row[name]) for row in rows])]
        return {**more, IN_ORDER_OF: sorted_by}

    def _begin(self) -> list[int]:
        """Return where the set is cut, as the destination says if this was begun before."""
        rows = len(self.samples)
        what = {"source": self.source, "arguments": [*self.arguments], "seed": self._seed, "samples": rows,
                "bytes_a_shard": self.bytes_a_shard}  # fmt: skip
        path = Path(self.source).expanduser()
        files = state_of(path) if path.exists() else None
        plan = self.dest / PLAN
        if plan.exists():
            begun = json.loads(plan.read_text())
            cuts: list[int] = begun.pop("cuts")
            files_then = begun.pop("files", None)
            if begun != what:
                raise RequestError(f"{self.dest} holds a part of another pack: {begun}. Give a new folder.")
            if files_then != files:
                raise RequestError(
                    f"{self.source} has changed since a part of it was packed to {self.dest}. Give a new folder."
                )
            return cuts
        if self.dest.exists() and any(each.name != ALONE for each in self.dest.iterdir()):
            done = " It is packed already." if (self.dest / NAME).exists() else ""
            raise RequestError(f"{self.dest} is there and is not empty.{done} Give a new folder.")
        size = max(1.0, float(np.mean([self.samples.size(number) for number in looked_at(rows)])))
        each = max(1, round(self.bytes_a_shard / size))
        cuts = [*range(0, rows, each), rows]
        write_aside(plan, lambda file: file.write(json.dumps({**what, "cuts": cuts, "files": files}).encode()))
        return cuts

    def _name(self, number: int) -> str:
        return f"part-{number:06}{self.samples.suffix}"

    def write(self, number: int, first: int, last: int) -> None:
        """Write a shard.

        Raises:
            RequestError: there is no space left for it, or a sample is no row.
        """
        rows = len(self.samples)
        order = Sequential(rows) if self._seed is None else Shuffled(rows, self._seed)
        numbers = order.samples(0, np.arange(first, last, dtype=np.uint64)).tolist()
        try:
            write_aside(self.dest / self._name(number), lambda file: self.samples.write(numbers, file))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise RequestError(
                f"There is no space left in {self.dest}. Free some, or copy it to a larger disk: the same command "
                f"goes on."
            ) from error


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
    found = make(**by_name(arguments))
    if not (hasattr(found, "__len__") and hasattr(found, "__getitem__")):
        raise RequestError(f"{name} makes a {type(found).__name__}, which is no map-style data set.")
    size_of(found)  # refuses what holds several
    return found


def by_name(arguments: Sequence[str]) -> dict[str, Any]:
    """Return arguments of a command, each ``key=value``, by their keys; values as JSON has them, else as texts.

    Raises:
        RequestError: one has no key.
    """
    pairs = [argument.partition("=") for argument in arguments]
    if wrong := [argument for argument, (key, equals, _) in zip(arguments, pairs, strict=True) if not (key and equals)]:
        raise RequestError(f"'{wrong[0]}' is no argument. Allowed: key=value, such as anon=true.")
    return {key: _parsed(value) for key, _, value in pairs}


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def state_of(path: Path) -> str:
    """Return what tells a file, or those in a folder, from what they were before: their names, sizes and dates."""
    names = sorted(name for name, _ in files_in(str(path))) if path.is_dir() else [""]
    statuses = ((name, (path / name).stat()) for name in names)
    return sha256(repr([(name, status.st_size, status.st_mtime_ns) for name, status in statuses]).encode()).hexdigest()


def _of_path(path: Path) -> Any:
    if path.is_dir() and (path / "state.json").exists() and (path / "dataset_info.json").exists():
        return _of_rows(needed("datasets").load_from_disk(str(path)))
    if (path / "dataset_dict.json").exists():
        several = ", ".join(sorted(str(each.parent) for each in path.glob("*/state.json")))
        raise RequestError(f"{path} holds several sets of Hugging Face's. Pack each by itself: {several}.")
    if path.is_dir():
        return _Images(path)
    if format_of(path.name) not in (None, ".tar"):
        from ddp_recipes.streams.dataset import Stream

        stream = Stream(str(path))
        stream.decoder = _Undecoded(stream.decoder.numbers)
        return _Made(stream)
    raise RequestError(f"{path} cannot be packed. Allowed: a folder of images, .csv, .jsonl, .parquet, .arrow or .txt.")


def _of_rows(dataset: Any) -> Any:
    loaded = sys.modules.get("datasets")  # of Hugging Face; one with a transform is what that makes of it
    own = loaded is not None and isinstance(dataset, loaded.Dataset) and dataset.format["type"] != "custom"
    return _HuggingFace(dataset) if own else _Made(dataset)


class _Undecoded(Decoder):
    """Leaves rows as they lie, nulls and images as well; but lists of numbers are tensors, as a stream has them.

    What is no number in a csv file's column of numbers is a null.
    """

    def __init__(self, numbers: Set[str]) -> None:
        super().__init__(None, None, None, None)
        self.numbers = numbers

    def __call__(self, row: Row) -> Row:
        lists = {name: as_tensor(value) for name, value in row.items() if isinstance(value, list)}
        return row | lists | {name: None for name in self.numbers if isinstance(row[name], str)}


class _Images:
    """Images in a folder a class, as tar files of their bytes, which are one column: ``img`` where suffixes differ.

    They are shuffled: that they lie class by class is due to folders, and the last ones would be of the last classes.
    """

    suffix, seed = ".tar", 0

    def __init__(self, root: Path) -> None:
        from torchvision.datasets import ImageFolder

        try:
            self.folder = ImageFolder(str(root))
        except (FileNotFoundError, OSError) as error:
            raise RequestError(f"{root} has no images in folders of classes: {error}") from error
        self.more = {"classes": self.folder.classes}
        kinds = {Path(path).suffix.lower().removeprefix(".").replace("jpeg", "jpg") for path, _ in self.folder.samples}
        self.kind = kinds.pop() if len(kinds) == 1 else "img"

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
                for kind, content in ((self.kind, Path(path).read_bytes()), ("cls", str(label).encode())):
                    member = tarfile.TarInfo(f"{number:09}.{kind}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))


class _Made:
    """Samples of a map-style data set, as parquet files: tensors are lists whose shape is in the schema."""

    suffix, seed = ".parquet", None
    more: ClassVar[Mapping[str, Any]] = {}

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

    @cached_property
    def columns(self) -> "dict[str, _Column]":
        """The columns of all shards, as some samples from all over the set have them."""
        numbers = looked_at(len(self))
        values = self._values(numbers, self.row(0))
        return {name: _Column.of(name, each, numbers) for name, each in values.items()}

    def _values(self, numbers: Sequence[int], names: Mapping[str, Any]) -> dict[str, list[Any]]:
        """Return samples by column.

        Args:
            names: has the columns, which are those of sample 0, as its keys.

        Raises:
            RequestError: a sample has others.
        """
        rows = [self.row(number) for number in numbers]
        for number, row in zip(numbers, rows, strict=True):
            if row.keys() != names.keys():
                raise RequestError(
                    f"Sample {number} has {', '.join(row)}, and sample 0 {', '.join(names)}: each is a column, which "
                    f"all samples have to have."
                )
        values = {}
        for name in names:
            with _as_request(name, numbers):
                values[name] = [_plain(row[name]) for row in rows]
        return values

    def write(self, numbers: list[int], file: Any) -> None:
        """Write samples as a parquet file.

        Raises:
            RequestError: one does not fit the columns that others have.
        """
        arrow = needed("pyarrow")
        values = self._values(numbers, self.columns)
        columns = [column.array(values[name], numbers) for name, column in self.columns.items()]
        schema = arrow.schema([column.field for column in self.columns.values()])
        _write_table(arrow.Table.from_arrays(columns, schema=schema), file)


class _HuggingFace(_Made):
    """Rows of a set of Hugging Face's, as parquet files: types and bytes as they lie, images not decoded."""

    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset.with_format("arrow", columns=dataset.format["columns"]))

    def row(self, number: int) -> dict[str, Any]:
        """Return a sample by column."""
        found: dict[str, Any] = self.dataset[[number]].to_pylist()[0]
        return found

    def size(self, number: int) -> int:
        """Return about the bytes that a sample takes."""
        return int(self.dataset[[number]].nbytes)

    def write(self, numbers: list[int], file: Any) -> None:
        """Write samples as a parquet file, with files that they only name."""
        _write_table(needed("datasets.table").embed_table_storage(self.dataset[numbers]), file)


def _write_table(table: Any, file: Any) -> None:
    group = max(1, round(GROUP * len(table) / max(1, table.nbytes)))
    # Samples repeat little, and a dictionary of them is read in half as much time again.
    needed("pyarrow.parquet").write_table(table, file, row_group_size=group, compression="zstd", use_dictionary=False)


def _is_sorted(values: Sequence[Any]) -> bool:
    """Whether numbers or texts from all over a set come in their order; of a few that may be by chance."""
    kinds = {*map(type, values)}
    if len(values) < LOOKED_AT // 2 or not (kinds <= {int, float, bool} or kinds == {str}) or values[0] == values[-1]:
        return False
    return list(values) in (sorted(values), sorted(values, reverse=True))


def looked_at(rows: int) -> list[int]:
    """Return the numbers of the samples that say what a set is like."""
    found: list[int] = np.linspace(0, rows - 1, min(rows, LOOKED_AT)).astype(int).tolist()
    return found


def _size(value: Any) -> int:
    if isinstance(value, torch.Tensor):  # a sparse one has no bytes
        return value.numel() * value.element_size()
    if hasattr(value, "nbytes"):
        return int(value.nbytes)
    if isinstance(value, Mapping):
        return sum(map(_size, value.values()))
    if isinstance(value, (str, bytes, list)):
        return len(value) * (8 if isinstance(value, list) else 1)
    return int(np.asarray(value.convert("RGB")).size // 8) if hasattr(value, "convert") else 8


def _plain(value: Any) -> Any:
    """Return a value as an array, or as what Arrow takes: images as their bytes."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = value.numpy() if value.dtype != torch.bfloat16 else value  # which NumPy has not: refused by its type
    if isinstance(value, (np.ndarray, np.generic)) and not value.ndim:
        return value.item()
    return _png(value) if hasattr(value, "convert") else value


@dataclass(frozen=True)
class _Column:
    """A column of one type in all shards.

    Attributes:
        field: of Arrow.
        shape: of arrays, the first size -1 where samples differ in it; None: it holds none.
    """

    name: str
    field: Any
    shape: tuple[int, ...] | None

    @classmethod
    def of(cls, name: str, values: Sequence[Any], numbers: Sequence[int]) -> "_Column":
        """Return the column that has these values of these samples.

        Raises:
            RequestError: no column has.
        """
        arrow = needed("pyarrow")
        with _as_request(name, numbers):
            if not all(isinstance(value, np.ndarray) for value in values):
                return cls(name, arrow.field(name, arrow.array(values).type), None)
            shapes = sorted({value.shape for value in values})
            shape = shapes[0] if len(shapes) == 1 else (-1, *shapes[0][1:])
            element, size = arrow.array(values[0].reshape(-1)).type, int(np.prod(shape))
            kind = arrow.list_(element, size) if len(shapes) == 1 else arrow.list_(element)
            return cls(name, arrow.field(name, kind, metadata={"shape": json.dumps(shape)}), shape)

    def array(self, values: Sequence[Any], numbers: Sequence[int]) -> Any:
        """Return values of samples as an array of Arrow.

        Raises:
            RequestError: they are of another type or shape.
        """
        arrow = needed("pyarrow")
        with _as_request(self.name, numbers):
            if self.shape is None:
                return arrow.array(values, type=self.field.type)
            for number, value in zip(numbers, values, strict=True):
                if not isinstance(value, np.ndarray) or not self._takes(value.shape):
                    shown = list(value.shape) if isinstance(value, np.ndarray) else type(value).__name__
                    raise RequestError(
                        f"{self.name} of sample {number} is {shown}, and others are {list(self.shape)} (-1: any): the "
                        f"first size may differ where it does among the {LOOKED_AT} samples from all over the set that "
                        f"are looked at first. Give all one shape, or images as PIL's."
                    )
            flat = arrow.array(np.concatenate([value.reshape(-1) for value in values]), type=self.field.type.value_type)
            if self.shape[0] != -1:
                return arrow.FixedSizeListArray.from_arrays(flat, self.field.type.list_size)
            return arrow.ListArray.from_arrays(np.cumsum([0, *(value.size for value in values)], dtype=np.int32), flat)

    def _takes(self, shape: tuple[int, ...]) -> bool:
        assert self.shape is not None
        return len(shape) == len(self.shape) and all(
            own in (-1, size) for own, size in zip(self.shape, shape, strict=True)
        )


@contextmanager
def _as_request(name: str, numbers: Sequence[int]) -> Iterator[None]:
    """Raise what Arrow, NumPy, torch and Pillow raise as a request that cannot be met."""
    try:
        yield
    except (needed("pyarrow").ArrowException, TypeError, ValueError, OverflowError, RuntimeError, OSError) as error:
        reason = WHOLE_NUMBERS if isinstance(error, OverflowError) else error
        raise RequestError(f"{name} of samples {numbers[0]} to {numbers[-1]} is no column: {reason}") from error


def _png(image: Any) -> bytes:
    """Return the bytes of an image as PNG, in RGB where PNG has not its mode, as it would be read.

    Raises:
        ValueError: numbers would be lost when it is read.
    """
    content = io.BytesIO()
    (image if image.mode in ("1", "L", "LA", "P", "RGB", "RGBA") else in_rgb(image)).save(content, "PNG")
    return content.getvalue()
