"""What strategies of several processes have in common: a process group."""

import time
from datetime import timedelta
from threading import Thread
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store

from ddp_recipes._compat.torch_ import count_groups_anew, every_group
from ddp_recipes.config.parallelism import StrategySettings
from ddp_recipes.devices import HOST_BACKEND
from ddp_recipes.runtime.messages import Messages, SignedStore
from ddp_recipes.runtime.tensors import digest
from ddp_recipes.runtime.world import World
from ddp_recipes.strategies.base import Strategy
from ddp_recipes.strategies.collectives import gather
from ddp_recipes.strategies.exchanges import exchanged
from ddp_recipes.tasks import Task

ABORT_S = 10.0  # how long to wait for groups to end


def make_store(messages: Messages | None, backend: str, timeout: timedelta) -> Store:
    """Return the store in which a backend of torch's finds the ranks."""
    if messages is None:
        return dist.HashStore()
    return SignedStore(messages.under("group"), timeout) if backend == "gloo" else messages.store


class Group(Strategy):
    """One process a replica; all of them in torch's default process group."""

    settings: StrategySettings
    timeout_s = 0.0  # of a collective
    stuck = False  # whether a group does not let itself be aborted

    def setup(
        self, world: World, messages: Messages | None, backend: str, timeout: timedelta, init_method: str | None
    ) -> None:
        """Join the process group, over the launcher's store or an address of the user's own."""
        self.world, self.timeout_s = world, timeout.total_seconds()
        self.silent = not backend.endswith(HOST_BACKEND)
        if init_method is not None:
            met: dict[str, Any] = {"init_method": init_method}
        else:
            # torch keeps no reference to what Python has made of a store
            met = {"store": make_store(messages, backend, timeout)}
            self.store = met["store"]
        dist.init_process_group(
            backend, rank=world.rank, world_size=world.world_size, timeout=timeout, device_id=self.bound, **met
        )
        if not self.silent:  # a rank whose work needs no other could leave while one still connects to it
            dist.barrier()

    def sum(self, values: Tensor) -> Tensor:
        values = values.sum(dim=0)
        if self.world.world_size > 1:
            exchanged(dist.all_reduce, values)
        self.exchanges.synchronize()
        return values

    def digest(self, task: Task) -> str | None:
        """Digest what is gathered, on rank 0."""
        weights = self.weights(task)
        return digest(weights) if self.world.is_main else None

    def gather(self, value: Any) -> list[Any] | None:
        values = gather(value)
        self.exchanges.synchronize()
        return values

    def abort(self) -> None:
        """Abort all groups at once: to end one, NCCL may wait for the device, and so for the kernels of the others."""
        ends = [Thread(target=each.abort, daemon=True) for each in every_group()]
        for each in ends:
            each.start()
        deadline = time.monotonic() + ABORT_S
        for each in ends:
            each.join(max(0.0, deadline - time.monotonic()))
        self.stuck = any(each.is_alive() for each in ends)

    def teardown(self) -> None:
        self.exchanges.close()
        self.peers = None
        if self.stuck:  # nor would a group let itself be destroyed, and this rank has to say what failed
            return
        if dist.is_initialized():
            dist.destroy_process_group()
        else:
            count_groups_anew()  # an attempt may have failed
