"""Cutting one table into training and validation rows, and putting its columns on one scale."""

import math

import torch
from torch import Tensor

from ddp_recipes.errors import RequestError, not_one_of


def rows_of(split: str, num_rows: int, *, val_fraction: float, seed: int) -> Tensor:
    """Return the rows (int64, ascending) of ``split``: ``train``, ``val`` or ``all``.

    ``ceil(val_fraction * num_rows)`` rows, drawn by ``seed``, are for validation, the others for training.
    Raises ``RequestError`` for another split, a fraction outside of 0..1, or a split that no row is left for.
    """
    if split not in ("train", "val", "all"):
        raise not_one_of("split", split, ("train", "val", "all"))
    if not 0 <= val_fraction < 1:
        raise RequestError(f"val_fraction={val_fraction} is not a share: allowed is 0 to less than 1, such as 0.2.")
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
