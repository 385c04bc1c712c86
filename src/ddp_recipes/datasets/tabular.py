"""Splitting and scaling a table; and small real ones, from scikit-learn's files.

scikit-learn is not imported: it would load SciPy in every rank.
"""

import math
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ddp_recipes.datasets.memory import InMemory
from ddp_recipes.errors import RequestError, not_one_of


def rows_of(split: str, num_rows: int, *, val_fraction: float, seed: int) -> Tensor:
    """Return the rows (int64, ascending) of ``split``: ``train``, ``val`` or ``all``.

    ``ceil(val_fraction * num_rows)`` rows, drawn by ``seed``, are for validation, the others for training.

    Raises:
        RequestError: there is no such split or fraction, or no row is left for the split.
    """
    if split not in ("train", "val", "all"):
        raise not_one_of("split", split, ("train", "val", "all"))
    if not 0 <= val_fraction < 1:
        raise RequestError(f"val_fraction={val_fraction} is not a fraction: allowed is 0 to less than 1, such as 0.2.")
    if split == "all":
        return torch.arange(num_rows)
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed))
    num_val = math.ceil(val_fraction * num_rows)
    rows = order[num_val:] if split == "train" else order[:num_val]
    if not len(rows):
        raise RequestError(
            f"val_fraction={val_fraction} of {num_rows} rows leaves none for split '{split}'. "
            "Choose another val_fraction, or leave that split out (data.val=null)."
        )
    return rows.sort().values


def standardize(columns: Tensor, training_rows: Tensor) -> Tensor:
    """Return ``columns`` (float64, ``[n, k]``) as float32 with the mean and deviation of ``training_rows`` removed.

    The deviation is that of the population. A column that is constant in training is only shifted.
    """
    training = columns[training_rows]
    deviation, mean = torch.std_mean(training, dim=0, correction=0)
    # By range, not by deviation: rounding may leave a constant column a tiny deviation.
    constant = training.amin(dim=0) == training.amax(dim=0)
    return ((columns - mean) / deviation.masked_fill(constant, 1)).to(torch.float32)


def digits(split: str = "train", seed: int = 42, val_fraction: float = 0.2) -> InMemory:
    """Return handwritten digits: inputs float32 ``[n, 64]`` (8x8 pixels), targets int64 ``[n]`` in 0..9.

    ``split`` is ``train`` (1437 samples), ``val`` (360) or ``all``. Inputs are scaled by the mean and
    deviation of ``train``.
    """
    return _table("digits.csv.gz", 0, split, seed, val_fraction)


def breast_cancer(split: str = "train", seed: int = 42, val_fraction: float = 0.2) -> InMemory:
    """Return the Wisconsin breast cancer data: inputs float32 ``[n, 30]``, targets int64 ``[n]`` in 0..1.

    ``split`` is ``train`` (455 samples), ``val`` (114) or ``all``. Inputs are scaled as those of ``digits``.
    """
    return _table("breast_cancer.csv", 1, split, seed, val_fraction)


def _table(name: str, header: int, split: str, seed: int, val_fraction: float) -> InMemory:
    """Cut one of scikit-learn's tables, whose last column is the class."""
    spec = find_spec("sklearn")
    path = Path(str(spec.origin if spec else None)).parent / "datasets" / "data" / name
    if not path.is_file():
        raise RequestError(f"This data ships with scikit-learn, and {path} is not there: pip install scikit-learn.")
    rows = _rows(path, header)
    columns, targets = rows[:, :-1], rows[:, -1].to(torch.int64)
    training = rows_of("train", len(targets), val_fraction=val_fraction, seed=seed)
    chosen = rows_of(split, len(targets), val_fraction=val_fraction, seed=seed)
    return InMemory(standardize(columns, training)[chosen], targets[chosen])


@lru_cache(1)
def _rows(path: Path, header: int) -> Tensor:
    """Return a table (float64), which is not to be changed: it is read once for all splits."""
    return torch.from_numpy(np.loadtxt(path, delimiter=",", skiprows=header))
