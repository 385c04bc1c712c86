"""A table in a csv file: columns of numbers, or of image files, and a target."""

import csv
import errno
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ddp_recipes.datasets.images import imagenet_transform, rgb_image
from ddp_recipes.datasets.memory import InMemory
from ddp_recipes.datasets.tabular import rows_of, standardize
from ddp_recipes.datasets.transforms import Transform, Transforms, in_order
from ddp_recipes.errors import RequestError, nearest


def csv_table(  # noqa: PLR0913 - keys of conf/data/csv.yaml, by name
    path: str | Path,
    inputs: Sequence[str],
    target: str,
    split: str = "train",
    *,
    val_fraction: float = 0.2,
    seed: int = 42,
    classes: Sequence[str | int] | None = None,
    standardized: bool = False,
    root: str | Path = ".",
    image_column: str | None = None,
    image_size: int = 224,
    transform: Transforms | None = None,
    delimiter: str = ",",
) -> Dataset[tuple[Tensor, Tensor]]:
    """Return rows of the csv file ``path``, whose first line names the columns.

    Inputs are either the number columns ``inputs``, float32 ``[n, len(inputs)]`` in memory, with ``standardized`` on
    the scale of their training rows; or, with ``image_column``, the images it names, relative to ``root``, read when
    fetched; ``transform`` takes an RGB PIL image, the default is ``imagenet_transform(image_size)``.

    Targets are the numbers of the column ``target``, float32 ``[n, 1]``; with ``classes`` the place of its text among
    them, int64 ``[n]``. ``split`` is ``train``, ``val`` or ``all``.

    Raises:
        RequestError: the file, a column or an image is missing, a number column holds anything else, or the target a
            class that is not among ``classes``.
    """
    table = _Table.read(Path(path).expanduser(), delimiter)
    targets = table.numbers([target]).float() if classes is None else table.labels(target, [str(c) for c in classes])
    rows = rows_of(split, len(table.rows), val_fraction=val_fraction, seed=seed)
    if image_column is not None:
        if len(inputs):
            raise RequestError(f"data.inputs={list(inputs)} and data.image_column={image_column}: leave one out.")
        files = table.files(image_column, Path(root).expanduser())
        chosen = imagenet_transform(image_size) if transform is None else in_order(transform)
        return ImageTable([files[row] for row in rows.tolist()], targets[rows], chosen)
    if not len(inputs) or target in inputs:
        raise RequestError(
            f"data.inputs={list(inputs)} for data.target={target}: give one column or more, and not the target. "
            f"Columns are: {', '.join(table.header)}."
        )
    columns = table.numbers(inputs)
    if standardized:
        columns = standardize(columns, rows_of("train", len(table.rows), val_fraction=val_fraction, seed=seed))
    return InMemory(columns[rows].float(), targets[rows])


class ImageTable(Dataset[tuple[Any, Tensor]]):
    """Image files and their targets ``[n, ...]``; an image is read, as RGB, and transformed when fetched."""

    def __init__(self, files: Sequence[Path], targets: Tensor, transform: Transform) -> None:
        self.files = files
        self.targets = targets
        self.transform = transform

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Any, Tensor]:
        return self.transform(rgb_image(self.files[index])), self.targets[index]


@dataclass(frozen=True)
class _Table:
    """The text of a csv file. ``rows`` are pairs of the line number and the fields."""

    path: Path
    header: list[str]
    rows: list[tuple[int, list[str]]]

    @classmethod
    def read(cls, path: Path, delimiter: str) -> "_Table":
        try:
            if path.exists() and not path.is_file():  # to open a pipe would wait for ever
                raise OSError(errno.EINVAL, "it is no regular file")
            # utf-8-sig: spreadsheets begin the file with a byte order mark, which would become part of a name.
            with path.open(newline="", encoding="utf-8-sig") as file:
                reader = csv.reader(file, delimiter=delimiter, skipinitialspace=True, strict=True)
                header = [name.strip() for name in next(reader, [])]
                rows = [(reader.line_num, fields) for fields in reader if fields]
        except (OSError, csv.Error, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise RequestError(
                f"data.path={path}: {path.absolute()} cannot be read as a csv file: {reason}. "
                "Set data.path to a csv file whose first line names its columns."
            ) from error
        if not rows:
            raise RequestError(f"data.path={path}: the file has no rows under its first line, which names the columns.")
        for line, fields in rows:
            if len(fields) != len(header):
                raise RequestError(
                    f"{path}, line {line}: {len(fields)} fields where the first line names {len(header)} columns."
                )
        return cls(path, header, rows)

    def column(self, name: str) -> Iterator[tuple[int, str]]:
        """Yield line number and text of each field of a column."""
        if name not in self.header:
            raise RequestError(
                f"{self.path} has no column '{name}'.{nearest(name, self.header)} "
                f"Columns are: {', '.join(self.header)}."
            )
        place = self.header.index(name)
        return ((line, fields[place].strip()) for line, fields in self.rows)

    def numbers(self, names: Sequence[str]) -> Tensor:
        """Return columns of numbers, float64 ``[n, len(names)]``."""
        columns = [[self._number(name, *field) for field in self.column(name)] for name in names]
        return torch.tensor(columns, dtype=torch.float64).T.contiguous()

    def labels(self, name: str, classes: list[str]) -> Tensor:
        """Return a column of class names as their places in ``classes``, int64 ``[n]``."""
        numbers = {label: number for number, label in enumerate(classes)}
        places = []
        for line, text in self.column(name):
            if text not in numbers:
                raise RequestError(
                    f"{self.path}, line {line}, column '{name}': '{text}' is not among the classes "
                    f"{', '.join(classes)}.{nearest(text, classes)} Name all classes in data.classes."
                )
            places.append(numbers[text])
        return torch.tensor(places)

    def files(self, name: str, root: Path) -> list[Path]:
        """Return a column of file names, relative to ``root``, as paths of files that are there."""
        paths = []
        for line, text in self.column(name):
            if not (root / text).is_file():
                raise RequestError(
                    f"{self.path}, line {line}, column '{name}': there is no file {(root / text).absolute()}. "
                    "Set data.root to the folder that the names are relative to."
                )
            paths.append(root / text)
        return paths

    def _number(self, name: str, line: int, text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise RequestError(f"{self.path}, line {line}, column '{name}': '{text}' is not a finite number.")
        return number
