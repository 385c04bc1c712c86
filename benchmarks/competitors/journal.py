"""What a rank that may be killed leaves of itself: a line for each step that it has finished."""

import os
import time
from pathlib import Path

import torch
from torch import nn

from benchmarks.player import Seat


class Journal:
    """A rank's file: when it finished a step, which one, as which process, and how many ranks took part in it."""

    def __init__(self, seat: Seat, rank: int) -> None:
        self.seat, self.rank = seat, rank
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self._file = os.open(Path(seat.directory) / "journal" / str(rank), flags, 0o600)

    def step(self, step: int, model: nn.Module, ranks: int | None = None) -> None:
        """Note a step that is done; after the last one of all, keep the weights."""
        ranks = self.seat.ranks if ranks is None else ranks
        if step == self.seat.max_steps and self.rank == 0:
            weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
            torch.save(weights, Path(self.seat.directory) / "weights.pt")
        os.write(self._file, f"{time.monotonic()} {step} {os.getpid()} {ranks}\n".encode())
