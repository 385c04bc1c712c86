"""Small real data that ships with scikit-learn, which is not imported: it would load SciPy in every rank."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from ddp_recipes.datasets.memory import InMemory
from ddp_recipes.datasets.split import rows_of, standardize
from ddp_recipes.errors import RequestError


def digits(split: str = "train", seed: int = 42, val_fraction: float = 0.2) -> InMemory:
    """Return handwritten digits: inputs float32 ``[n, 64]`` (8x8 pixels), targets int64 ``[n]`` in 0..9.

    ``split`` is ``train`` (1437 samples), ``val`` (360) or ``all``. Inputs are standardised with the mean and
    deviation of the training part.
    """
    return _table("digits.csv.gz", 0, split, seed, val_fraction)


def breast_cancer(split: str = "train", seed: int = 42, val_fraction: float = 0.2) -> InMemory:
    """Return the Wisconsin breast cancer data: inputs float32 ``[n, 30]``, targets int64 ``[n]`` in 0..1.

    ``split`` is ``train`` (455 samples), ``val`` (114) or ``all``. Inputs are standardised with the mean and
    deviation of the training part.
    """
    return _table("breast_cancer.csv", 1, split, seed, val_fraction)


def _table(name: str, header: int, split: str, seed: int, val_fraction: float) -> InMemory:
    """Cut one of scikit-learn's tables, whose last column is the class.

    Raises:
        RequestError: scikit-learn is not installed, or has no such file.
    """
    spec = find_spec("sklearn")
    path = Path(str(spec.origin if spec else None)).parent / "datasets" / "data" / name
    if not path.is_file():
        raise RequestError(f"This data ships with scikit-learn, and {path} is not there: pip install scikit-learn.")
    rows = torch.from_numpy(np.loadtxt(path, delimiter=",", skiprows=header))
    columns, targets = rows[:, :-1], rows[:, -1].to(torch.int64)
    training = rows_of("train", len(targets), val_fraction=val_fraction, seed=seed)
    chosen = rows_of(split, len(targets), val_fraction=val_fraction, seed=seed)
    return InMemory(standardize(columns, training)[chosen], targets[chosen])
