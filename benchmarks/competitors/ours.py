"""This package, through ``python train.py``: a callback from the config takes turns like the others.

Its logger, progress and checkpoints are on, as they are by default; their cost is in its turns.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.competitors.journal import Journal
from benchmarks.player import Player, Seat
from ddp_recipes.callbacks import Callback
from ddp_recipes.strategies.ddp.shared_memory import SharedMemory


class TakeTurns(Callback):
    """Waits before the first step and at the end of each turn."""

    def __init__(self) -> None:
        self.seat = Seat.mine()
        self.player: Player | None = None

    def on_start(self, directory: Path | None, task: torch.nn.Module) -> None:
        """Take a seat; wait for the first turn."""
        rank = int(os.environ.get("RANK", "0"))
        if self.seat.option == "bare":  # a start is measured without what the others' workloads would load
            self.player = Player(self.seat, rank)
        else:
            from benchmarks.competitors.place import waiting, workload_of

            workload, device = workload_of(self.seat), next(task.parameters()).device
            level = workload.level(task.get_submodule("model"))
            self.player = Player(self.seat, rank, level, waiting(device), everywhere=workload.sharded)
        if self.seat.option == "collectives":
            count_collectives(self.player)
        self.player.begin()

    def on_step(self, step: int) -> None:
        """Count; at the end of a turn, wait."""
        assert self.player is not None
        self.stop = not self.player.step()


class KeepJournal(Callback):
    """Notes each step, for a run whose ranks are killed."""

    def on_start(self, directory: Path | None, task: torch.nn.Module) -> None:
        """Open this rank's journal."""
        self.task = task
        self.journal = Journal(Seat.mine(), int(os.environ.get("RANK", "0")))

    def on_step(self, step: int) -> None:
        """Note the step."""
        self.journal.step(step, self.task)


def count_collectives(player: Player) -> None:
    """Count this process's calls of collectives, other than those inside DDP, from now on."""
    player.extra["collectives"] = 0

    def counted(collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            player.extra["collectives"] += 1
            return collective(*args, **kwargs)

        return call

    gather = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    for name in ("all_reduce", "broadcast", "all_gather", gather, "all_to_all", "barrier", "reduce"):
        setattr(dist, name, counted(getattr(dist, name)))
    setattr(SharedMemory, "sum", counted(SharedMemory.sum))  # noqa: B010


def command(seat: Seat, *overrides: str) -> list[str]:
    """Return the command line that trains what ``seat`` says."""
    from benchmarks.competitors.place import workload_of
    from benchmarks.samples import ROOT

    return [
        sys.executable,
        str(ROOT / "train.py"),
        *workload_of(seat).overrides(seat.workload, seat.device, seat.shuffle),
        f"launcher.nproc_per_node={seat.ranks}",
        "trainer.max_epochs=null",
        f"trainer.max_steps={seat.max_steps}",  # or until the callback says so
        f"hydra.run.dir={seat.directory}/run",
        "+callbacks.turns._target_=benchmarks.competitors.ours.TakeTurns",
        *overrides,
    ]


def with_overrides(*overrides: str) -> Callable[[Seat], list[str]]:
    """Return :func:`command` with more overrides."""
    return lambda seat: command(seat, *overrides)
