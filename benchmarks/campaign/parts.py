"""What a run of the campaign brings along, as a user's own code would: a model, a data set and a callback.

They keep a journal of the steps taken, and do in the midst of a rank the faults that are ordered there: an exception, a
segmentation fault, an exit. The campaign's folder is in ``CAMPAIGN_FOLDER``.
"""

import ctypes
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import Dataset

from benchmarks.campaign.script import TEXT
from ddp_recipes import Callback
from ddp_recipes.datasets import random_regression

RANK = int(os.environ.get("RANK", "0"))
FOLDER = Path(os.environ["CAMPAIGN_FOLDER"])
step = 0  # the last one that this process has finished


def note(word: str, number: int) -> None:
    """Append ``<process> <word> <number>`` to the journal: one write, so lines of several processes do not mix."""
    with (FOLDER / "journal").open("ab", buffering=0) as journal:
        journal.write(f"{os.getpid()} {word} {number}\n".encode())


if RANK == 0:
    note("began", 0)


def reach(place: str) -> None:
    """Do what is ordered for this rank at this place, once: the order is torn up before."""
    order = FOLDER / "order.json"
    try:
        wanted = json.loads(order.read_text())
    except FileNotFoundError:
        return
    if (wanted["rank"], wanted["place"]) != (RANK, place) or step < wanted["step"]:
        return
    order.unlink()
    note(wanted["kind"], step)
    match wanted["kind"]:
        case "exception":
            raise ValueError(f"{TEXT} of rank {RANK} at step {step}")
        case "exit_0":
            os._exit(0)
        case "exit_3":
            os._exit(3)
        case "segfault":
            ctypes.string_at(0)


register_optimizer_step_pre_hook(lambda *_: reach("optimizer"))


class Disturbed(nn.Module):
    """A multi-layer perceptron with dropout: ``[n, in_features]`` to ``[n, out_features]``."""

    def __init__(
        self, in_features: int, out_features: int, hidden_features: Sequence[int] = (32,), dropout: float = 0.2
    ) -> None:
        super().__init__()
        sizes = [in_features, *hidden_features]
        hidden = [
            module
            for size, next_size in zip(sizes, hidden_features, strict=False)
            for module in (nn.Linear(size, next_size), nn.Dropout(dropout), nn.ReLU())
        ]
        self.layers = nn.Sequential(*hidden, nn.Linear(sizes[-1], out_features))
        reach("making")

    def forward(self, input: Tensor) -> Tensor:
        reach("forward" if self.training else "validation")
        output: Tensor = self.layers(input)
        if output.requires_grad:
            output.register_hook(lambda gradient: reach("backward"))  # type: ignore[no-untyped-call]
        return output


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Random samples that are read one by one, under a random transform: what data workers are for."""

    def __init__(self, num_samples: int, in_features: int, out_features: int, seed: int, split: str) -> None:
        self.samples = random_regression(num_samples, in_features, out_features, seed, split)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.samples[index]
        return inputs + 0.1 * torch.randn_like(inputs), targets


class Noise:
    """Adds what a sample draws at random."""

    def __call__(self, inputs: Tensor) -> Tensor:
        return inputs + 0.1 * torch.randn_like(inputs)


class Journal(Callback):
    """Notes each step, and makes it last ``sleep_s`` seconds longer, so that there is time to disturb it."""

    def __init__(self, sleep_s: float = 0.02) -> None:
        self.sleep_s = sleep_s

    def on_step(self, number: int) -> None:
        """Note the step, on rank 0."""
        global step
        step = number
        if RANK == 0:
            note("step", number)
        # Ranks whose launcher is gone have to end, too, and not because they have come to the last step anyway.
        time.sleep(1 if (FOLDER / "slow").exists() else self.sleep_s)
        reach("step")

    def on_validation(self, number: int, metrics: Mapping[str, float]) -> None:
        """Be there."""
        reach("validated")

    def on_save(self, number: int) -> None:
        """Be there: with ``checkpoint.async_save`` the save has only begun."""
        reach("saved")
