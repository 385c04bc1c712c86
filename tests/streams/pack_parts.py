"""Map-style data sets of ten samples each, that a user might pack."""

import os
from multiprocessing import parent_process
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import torch
from PIL import Image


class Ten:
    """Samples of two kinds of arrays and a number, of different lengths."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        tokens = torch.arange(index + 1, dtype=torch.int16)
        points = np.arange(3.0 * (index + 1)).reshape(index + 1, 3)
        return {"tokens": tokens, "points": points, "label": index if index < 5 else index + 0.5}


class Missing(Ten):
    """The last ones have no label."""

    def __getitem__(self, index: int) -> Any:
        return {"x": index, **({"label": 1.0} if index < 7 else {})}


class OtherShapes(Ten):
    """Pictures as arrays, each of its own size."""

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(3, index + 1, 5), index


class LateShape(Ten):
    """Has a hundred samples, of which one, that nobody looks at first, is longer."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(4 if index == 50 else 3), index


class LateKind(LateShape):
    """Has a text in the place of a number."""

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(3), "fifty" if index == 50 else index


class Bfloat(Ten):
    """Has numbers that NumPy has not."""

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(3, dtype=torch.bfloat16), index


class Sparse(Ten):
    """Has tensors that lie by their indices."""

    def __getitem__(self, index: int) -> Any:
        return torch.eye(3).to_sparse(), index


class Large(Ten):
    """Has numbers that no signed one of 64 bits is."""

    def __getitem__(self, index: int) -> Any:
        return 2**63 + index, index


class Depths(Ten):
    """Has images whose pixels are floats."""

    def __getitem__(self, index: int) -> Any:
        return Image.new("F", (4, 5)), index


class Printed(Ten):
    """Has images in four colours of ink."""

    def __getitem__(self, index: int) -> Any:
        return Image.new("CMYK", (4, 5), (0, 255, 0, 0)), index


def several() -> dict[str, Ten]:
    """Return sets by name, as ``datasets.load_dataset`` does without a split."""
    return {"train": Ten(), "test": Ten()}


class Unsendable(Ten):
    """Cannot be given to another process, as what holds an open file or a function without a name."""

    def __init__(self) -> None:
        self.double = lambda index: 2 * index

    def __getitem__(self, index: int) -> Any:
        return {"x": self.double(index)}


class Held(LateShape):
    """Gives a worker that packs it no sample; a file named by its process says that it waits for one."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __getitem__(self, index: int) -> Any:
        if parent_process() is not None:
            (Path(self.folder) / str(os.getpid())).touch()
            Event().wait(600)
        return {"x": index}
