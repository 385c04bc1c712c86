"""What hand-written programs share that has no part in a step: who they are, and the process group."""

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.player import Player, Seat
from benchmarks.workloads import Workload, get


@dataclass(frozen=True)
class Place:
    """A rank's place."""

    seat: Seat
    rank: int
    device: torch.device
    workload: Workload

    @classmethod
    def mine(cls) -> "Place":
        """Return this process's place, as the environment says."""
        seat = Seat.mine()
        rank = int(os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or 0)  # Lightning sets the second one only
        device = torch.device("cuda", rank) if seat.device == "cuda" else torch.device("cpu")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        return cls(seat, rank, device, workload_of(seat))

    def join(self) -> None:
        """Join the other ranks, if there are any."""
        if self.seat.ranks > 1:
            dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")

    def player(self, model: nn.Module) -> Player:
        """Return the player; ``model`` is the bare one."""
        return Player(
            self.seat, self.rank, self.workload.level(model), waiting(self.device), everywhere=self.workload.sharded
        )


def workload_of(seat: Seat) -> Workload:
    """Return what a competitor trains."""
    return get(seat.workload, None if seat.epoch_steps is None else seat.epoch_steps * seat.ranks)


def waiting(device: torch.device) -> Callable[[], None] | None:
    """Return what waits until the device has done all it was told."""
    return torch.cuda.synchronize if device.type == "cuda" else None
