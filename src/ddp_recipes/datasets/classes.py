"""Classes of data on disk, for yaml files to interpolate; loads no torch. What is not there, its data set refuses."""

import csv
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path


def folder_classes(root: str) -> int | None:
    """Return how many classes are in the first of ``root/train``, ``root/val`` and ``root/test`` that is there."""
    for split in ("train", "val", "test"):
        if (folder := Path(root).expanduser() / split).is_dir():
            return sum(entry.is_dir() for entry in folder.iterdir())
    return None


def column_classes(path: str, column: str, delimiter: str, loss: str) -> list[str] | None:
    """Return the texts of a column of a csv file in their order; ``None`` where it has values and not classes.

    Texts are classes, and so are whole numbers where the loss (its dotted name) is one of classes. Where it is one of
    values nothing is.
    """
    if any(name in loss for name in ("MSE", "L1Loss", "Huber")):
        return None
    try:
        file = Path(path).expanduser()
        if not file.is_file():  # to open a pipe would wait for ever
            return None
        texts = _texts(file, column, delimiter, file.stat().st_mtime_ns)
    except (OSError, ValueError, IndexError, csv.Error):
        return None
    try:
        numbers = {float(text): text for text in texts}
    except ValueError:
        return sorted(texts)
    of_classes = "CrossEntropy" in loss or "NLL" in loss
    return [numbers[number] for number in sorted(numbers)] if of_classes and _whole(numbers) else None


@lru_cache(maxsize=8)
def _texts(path: Path, column: str, delimiter: str, changed_ns: int) -> frozenset[str]:
    """Return what is in a column of the file as it was at that time: several keys of a config ask for it."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = csv.reader(file, delimiter=delimiter, skipinitialspace=True)
        place = [name.strip() for name in next(rows, [])].index(column)
        return frozenset(fields[place].strip() for fields in rows if fields)


def num_outputs(classes: Sequence[str] | None) -> int:
    """Return how many outputs a model has for so many classes, or for a value."""
    return 1 if classes is None else len(classes)


def _whole(numbers: dict[float, str]) -> bool:
    return all(number.is_integer() for number in numbers)
