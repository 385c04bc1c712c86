"""Data order at sizes where a list of indices no longer fits: time to the first batch, time to resume, memory.

``python -m benchmarks.order ours 1000000`` measures one size in a process of its own, which is how the rest is done.
"""

import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, Dataset
from torch.utils.data.distributed import DistributedSampler

from benchmarks.player import peak_memory
from benchmarks.results import Group, Row, Settings
from benchmarks.samples import ROOT, SEED
from benchmarks.turns import Spread
from ddp_recipes.data.loader import Loader
from ddp_recipes.data.order import BatchPlan, Shuffled

SIZES = (10**6, 10**7, 10**8, 10**9)
LARGEST = {"ours": 10**9, "DistributedSampler": 10**7}  # its list of 10**9 would take 40 GB
BATCH_SIZE, BATCHES = 256, 1000
GOALS = {"start": (1.0, "s"), "resume": (1.0, "s"), "memory": (50.0, "MB"), "batch": (None, "µs")}


class Indices(Dataset[Any]):
    """As many samples as one likes; each is its own number."""

    batched = True

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def fetch(self, indices: Tensor) -> Tensor:
        """Return the samples ``indices``."""
        return indices


def measure(settings: Settings) -> Group:
    """Measure start, resume, memory and the cost of a batch at each size."""
    sizes = (SIZES[0], SIZES[-1]) if settings.quick else SIZES
    rows = []
    raw: dict[str, Any] = {}
    for name, largest in LARGEST.items():
        for size in sizes:
            if size <= largest:
                figures = [in_a_process(name, size) for _ in range(1 if settings.quick else 3)]
                raw[f"{name}, {size:.0e}"] = figures
                for what, (goal, unit) in GOALS.items():
                    spread = Spread.of([[figure[what] for figure in figures]])
                    held = goal if name == "ours" and size == SIZES[-1] else None
                    rows.append(Row(f"order of 1e{len(str(size)) - 1} samples, {what}", name, spread, held, unit))
    return Group(rows, raw)


def in_a_process(name: str, size: int) -> dict[str, float]:
    """Measure one size in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.order", name, str(size)]
    figures: dict[str, float] = json.loads(subprocess.check_output(command, cwd=ROOT, text=True))
    return figures


def figures_of(name: str, size: int) -> dict[str, float]:
    """Measure start, resume (in the middle of the fourth epoch), memory and the median batch."""
    batches = computed if name == "ours" else listed
    next(batches(1000, 0, 0))  # what is imported or allocated once is not the order's
    before = peak_memory()
    began = time.perf_counter()
    running = batches(size, 0, 0)
    next(running)
    started = time.perf_counter()
    laps = [started]
    for _ in itertools.islice(running, BATCHES):
        laps.append(time.perf_counter())
    resuming = time.perf_counter()
    next(batches(size, 3, size // BATCH_SIZE // 2))
    resumed = time.perf_counter()
    return {
        "start": started - began,
        "resume": resumed - resuming,
        "memory": (peak_memory() - before) / 1e6,
        "batch": 1e6 * statistics.mean(after - before for before, after in itertools.pairwise(laps)),
    }


def computed(size: int, epoch: int, first: int) -> Iterator[Any]:
    """Yield this package's batches."""
    plan = BatchPlan(Shuffled(size, SEED), BATCH_SIZE, seed=SEED)
    return Loader(Indices(size), plan, torch.device("cpu")).batches(epoch, first)


def listed(size: int, epoch: int, first: int) -> Iterator[Any]:
    """Yield torch's batches: a list of all indices, of which what is done already is skipped."""
    sampler: Any = DistributedSampler(Indices(size), num_replicas=1, rank=0, seed=SEED)
    sampler.set_epoch(epoch)
    for indices in itertools.islice(BatchSampler(sampler, BATCH_SIZE, drop_last=False), first, None):
        yield torch.tensor(indices)


if __name__ == "__main__":
    print(json.dumps(figures_of(sys.argv[1], int(sys.argv[2]))))
