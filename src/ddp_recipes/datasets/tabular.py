"""Small real data that ships with scikit-learn: no download."""

from typing import Any

import torch

from ddp_recipes.datasets.memory import InMemory
from ddp_recipes.datasets.split import rows_of, standardize


def digits(split: str = "train", seed: int = 42, val_fraction: float = 0.2) -> InMemory:
    """Return handwritten digits: inputs float32 ``[n, 64]`` (8x8 pixels), targets int64 ``[n]`` in 0..9.

    ``split`` is ``train`` (1437 samples), ``val`` (360) or ``all``. Inputs are standardised with the mean and
    deviation of the training part.
    """
    from sklearn.datasets import load_digits

    return _table(load_digits(), split, seed, val_fraction)


def breast_cancer(split: str = "train", seed: int = 42, val_fraction: float = 0.2) -> InMemory:
    """Return the Wisconsin breast cancer data: inputs float32 ``[n, 30]``, targets int64 ``[n]`` in 0..1.

    ``split`` is ``train`` (455 samples), ``val`` (114) or ``all``. Inputs are standardised with the mean and
    deviation of the training part.
    """
    from sklearn.datasets import load_breast_cancer

    return _table(load_breast_cancer(), split, seed, val_fraction)


def _table(bunch: Any, split: str, seed: int, val_fraction: float) -> InMemory:
    """Cut what a scikit-learn loader returned."""
    columns = torch.from_numpy(bunch.data).to(torch.float64)
    targets = torch.from_numpy(bunch.target).to(torch.int64)
    training = rows_of("train", len(targets), val_fraction=val_fraction, seed=seed)
    rows = rows_of(split, len(targets), val_fraction=val_fraction, seed=seed)
    return InMemory(standardize(columns, training)[rows], targets[rows])
