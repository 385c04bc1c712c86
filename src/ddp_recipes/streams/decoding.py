"""Rows to samples: columns by name, images decoded, numbers and texts as tensors."""

import io
import json
from collections.abc import Callable, Mapping, Sequence, Set
from decimal import Decimal
from typing import Any

import numpy as np
import torch

from ddp_recipes.datasets.images import imagenet_transform, in_rgb
from ddp_recipes.errors import RequestError, nearest
from ddp_recipes.streams.reader import BadRow, Row

Names = str | Sequence[str] | None
_JPEG, _PNG, _WEBP, _GIF = b"\xff\xd8\xff", b"\x89PNG", b"RIFF", b"GIF8"
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")  # of Pillow's; some others start programs
_LEAST, _MOST = -(1 << 63), (1 << 63) - 1
WHOLE_NUMBERS = f"whole numbers have 64 bits: from {_LEAST} to {_MOST}"
_IMAGES = ("img", "jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "pgm")  # suffixes of theirs


class Decoder:
    """Makes samples of rows.

    Attributes:
        columns: that are read; None: all.
        of_targets: those of the targets.
        numbers: columns in which a text is a number that is missing.
    """

    numbers: Set[str] = frozenset()

    def __init__(
        self, inputs: Names, targets: Names, transform: Callable[[Any], Any] | None, image_size: int | None
    ) -> None:
        if inputs is None and (targets is not None or transform is not None):
            raise RequestError("data.inputs=null makes a sample of the whole row, without targets and transform.")
        self.inputs, self.targets = _names(inputs), _names(targets)
        self.transform = transform
        self.of_images = _tensors if image_size is None else imagenet_transform(image_size)
        self.of_targets = _listed(self.targets)
        both = [*_listed(self.inputs), *self.of_targets]
        self.columns = None if inputs is None else both

    def check(self, known: Mapping[str, str], path: str) -> None:
        """Refuse columns that are not there, where the format says which there are.

        Raises:
            RequestError: names one.
        """
        for name in (self.columns or ()) if known else ():
            if name not in known:
                raise RequestError(
                    f"{path} has no column '{name}'.{nearest(name, known)} Columns are: {', '.join(known)}. Give "
                    f"data.inputs and data.targets."
                )

    def __call__(self, row: Row) -> Any:
        """Return the sample of a row.

        Raises:
            BadRow: a column is missing, or is not what it should be.
        """
        if self.inputs is None:
            return {name: _tensors(of_column(name, value)) for name, value in row.items()}
        inputs = self._of(row, self.inputs)
        if self.transform is not None:
            inputs = self.transform(inputs)
        elif hasattr(inputs, "convert"):  # an image of PIL's
            inputs = self.of_images(inputs)
        return inputs if self.targets is None else (inputs, _tensors(self._of(row, self.targets)))

    def _of(self, row: Row, names: str | tuple[str, ...]) -> Any:
        if isinstance(names, str):
            value = _found(row, names)
            if isinstance(value, str) and names in self.numbers:
                raise BadRow(f"its '{names}' is '{value}', and no number as in other rows")
            return of_column(names, value)
        found = [(name, _found(row, name)) for name in names]
        values = [value if isinstance(value, int) else of_column(name, value) for name, value in found]
        try:
            numbers = [float(value) if isinstance(value, str) and "_" not in value else value for value in values]
            return torch.tensor(numbers, dtype=torch.float32)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            shown = ", ".join(f"{name}={value!r}" for name, value in zip(names, values, strict=True))
            raise BadRow(f"{shown} are not all numbers") from error


def _names(given: Names) -> Any:
    if given is not None and not isinstance(given, (str, Sequence)):
        raise RequestError(
            f"data.inputs or data.targets is {given}. Allowed: a column's name, a list of names, or null."
        )
    return given if given is None or isinstance(given, str) else tuple(given)


def _listed(names: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if names is None else (names,) if isinstance(names, str) else names


def _found(row: Row, name: str) -> Any:
    try:
        return row[name]
    except KeyError:
        raise BadRow(f"it has no '{name}', but {', '.join(row)}") from None


def of_column(name: str, value: Any) -> Any:
    """Return what a column holds as a model takes it: images of PIL's, lists of numbers as tensors."""
    if isinstance(value, int) and not _LEAST <= value <= _MOST:
        raise BadRow(f"its '{name}' is {value}, and {WHOLE_NUMBERS}")
    if isinstance(value, (str, int, float)):
        return value
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, Mapping) and isinstance(value.get("bytes"), bytes):  # an image of Hugging Face's datasets
        value = value["bytes"]
    if isinstance(value, bytes):
        return _of_bytes(name, value)
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, list):
        if None in value and any(isinstance(each, int) for each in value):
            raise BadRow(f"its '{name}' has a null among whole numbers or booleans")
        return as_tensor(value)
    if value is None:
        raise BadRow(f"its '{name}' is null")
    return value


def as_tensor(value: list[Any]) -> Any:
    """Return a list as a tensor where it is one of numbers; else as it is: an empty one may be of texts."""
    try:
        found = torch.tensor(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last two of numbers too large, and of nulls
        return value
    return found if found.numel() else value


def _of_bytes(name: str, value: bytes) -> Any:
    suffix = name.rpartition(".")[2]
    try:
        known = value[:4].startswith((_JPEG, _PNG, _GIF)) or (value[:4] == _WEBP and value[8:12] == b"WEBP")
        if known or suffix in _IMAGES:
            return _image(value)
        if suffix in ("cls", "cls2", "index", "count", "len"):
            return int(value)
        if suffix in ("json", "jsn"):
            return json.loads(value)
        if suffix in ("txt", "text", "transcript", "caption"):
            return value.decode()
        if suffix == "npy":
            return torch.from_numpy(np.load(io.BytesIO(value)))
        if suffix == "npz":
            return {key: torch.from_numpy(array) for key, array in np.load(io.BytesIO(value)).items()}
    except Exception as error:  # what a decoder raises of damaged bytes may be anything
        if type(error).__name__ == "UnidentifiedImageError":  # which names an object in memory
            raise BadRow(f"its '{name}' is no image: it begins with {value[:8]!r}") from error
        raise BadRow(f"its '{name}' cannot be decoded: {error}") from error
    return value


def _image(content: bytes) -> Any:
    from PIL import Image

    with Image.open(io.BytesIO(content), formats=_FORMATS) as image:
        return in_rgb(image)


def _tensors(value: Any) -> Any:
    """Return an image as uint8 ``[3, h, w]``, and anything else as it is."""
    return torch.from_numpy(np.array(value)).permute(2, 0, 1).contiguous() if hasattr(value, "convert") else value
