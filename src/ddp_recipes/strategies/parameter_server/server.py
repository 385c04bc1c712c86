"""What a server does beside the optimizer's step: hand out weights, take in gradients, go on without dead workers."""

import logging
from collections import deque
from datetime import timedelta
from queue import Empty, SimpleQueue
from threading import Thread

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store

from ddp_recipes.errors import RunFailed
from ddp_recipes.runtime.control import has_failed
from ddp_recipes.strategies.parameter_server.messages import ASK, GRADIENTS, WEIGHTS, Push, Served

log = logging.getLogger(__name__)

_FOR_EVER = timedelta(days=365)  # a worker may compute, or all ranks may evaluate, for as long as they like


class Server:
    """Serves the workers. A thread for each worker takes in its messages; the main thread does all else.

    A shard of a batch is done once its gradients are here, or lost. A worker gets weights for a shard once all shards
    of steps more than ``staleness`` before it are done.

    Args:
        workers: their ranks; a step has as many shards.
        store: where ranks record failures.
        claims: where a worker claims a shard, if they are not dealt beforehand.
    """

    def __init__(
        self, workers: range, staleness: int, store: Store, claims: Store, served: Served, timeout_s: float
    ) -> None:
        self.living = list(workers)
        self._shards, self._staleness, self._timeout_s = len(workers), staleness, timeout_s
        self._store, self._claims, self._served = store, claims, served
        self._inbox: SimpleQueue[tuple[int, int, Push | None]] = SimpleQueue()  # worker, shard, its gradients
        self._asking: dict[int, int] = {}  # worker -> the shard that it wants weights for
        self._arrived: deque[tuple[int, Push | None]] = deque()  # done, but not yet in a step; None: lost
        self._first, self._done = 0, set[int]()  # the first shard that is not done; those after it that are

    def listen(self) -> None:
        """Begin to take in messages."""
        for worker in self.living:
            Thread(target=self._take_in, args=[worker], daemon=True).start()

    def _take_in(self, worker: int) -> None:
        """Wait for a worker's messages: it asks for weights, then sends gradients, and so on until it exits."""
        try:
            while True:
                shard = torch.empty(1, dtype=torch.int64)
                _receive(shard, worker, ASK)
                self._inbox.put((worker, int(shard), None))
                push = Push(self._served)
                _receive(push.message, worker, GRADIENTS)
                self._inbox.put((worker, int(shard), push))
        except (RuntimeError, ValueError):  # its connection is closed, or this rank has left the group
            self._inbox.put((worker, -1, None))

    def collect(self) -> list[tuple[int, Push]]:
        """Return the gradients of the next step, by shard: of as many as a step has, whichever are here first.

        Raises:
            RunFailed: none came in time, or no worker is left.
        """
        weights = self._served.pack()
        while len(self._arrived) < self._shards:
            for worker, shard in list(self._asking.items()):
                if shard // self._shards - self._first // self._shards <= self._staleness:
                    del self._asking[worker]
                    try:
                        dist.send(weights, worker, tag=WEIGHTS)
                    except RuntimeError:
                        self.go_on_without(worker)
            self._wait()
        step = sorted(self._arrived.popleft() for _ in range(self._shards))
        return [(shard, push) for shard, push in step if push is not None]

    def _wait(self) -> None:
        """Wait for a message."""
        try:
            worker, shard, push = self._inbox.get(timeout=self._timeout_s)
        except Empty:
            owing = [worker for worker in self.living if worker not in self._asking]
            raise RunFailed(
                f"Timed out after launcher.timeout_s={self._timeout_s:g} seconds without gradients from rank "
                f"{', '.join(map(str, owing))}.",
                unresponsive=owing,
            ) from None
        if push is not None:
            self._finish(shard, push)
        elif shard >= 0:
            self._asking[worker] = shard
        else:
            self.go_on_without(worker)

    def _finish(self, shard: int, push: Push | None) -> None:
        self._arrived.append((shard, push))
        self._done.add(shard)
        while self._first in self._done:
            self._done.remove(self._first)
            self._first += 1

    def go_on_without(self, worker: int) -> None:
        """Leave out a worker that died, and say what is lost with it.

        Raises:
            RuntimeError: the run ends with the worker.
            RunFailed: it was the last one.
        """
        if worker not in self.living:
            return
        if not self._staleness or has_failed(self._store, worker):
            raise RuntimeError(f"Connection closed by rank {worker}.")
        self.living.remove(worker)
        self._asking.pop(worker, None)
        lost, shard = [], self._first
        while self._claims.check([str(shard)]):  # they are claimed in their order
            if shard not in self._done and self._claims.get(str(shard)) == str(worker).encode():
                lost.append(shard)
            shard += 1
        for shard in lost:
            self._finish(shard, None)
        if not self.living:
            raise RunFailed(f"Rank {worker} died, the last worker.", rank=worker)
        log.warning(
            "Rank %d died; %d of %d workers go on. Lost with it, out of %d shards of each batch: %s.",
            worker,
            len(self.living),
            self._shards,
            self._shards,
            ", ".join(f"1 of step {shard // self._shards + 1} since the start" for shard in lost) or "none",
        )


def _receive(message: Tensor, source: int, tag: int) -> None:
    work = dist.irecv(message, source, tag=tag)
    assert work is not None
    work.wait(_FOR_EVER)
