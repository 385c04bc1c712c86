"""What each server holds, and the messages about it.

And what it does beside the optimizer's step: hand out weights, take in gradients, go on without dead workers.
"""

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import accumulate, count
from queue import Empty, SimpleQueue
from threading import Thread

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_recipes.errors import RunFailed
from ddp_recipes.runtime.control import has_failed
from ddp_recipes.runtime.messages import Messages
from ddp_recipes.runtime.world import World
from ddp_recipes.strategies.exchanges import receive, send

# Tags: a message of one kind does not wait for those of another. DEAL plus a worker's rank is about that worker.
ASK, WEIGHTS, GRADIENTS, SUM, DEAL = range(5)
ANY = -1  # in place of a shard: whichever is free
_ALIGNED = 16  # bytes, so that any dtype can begin there


def copy(into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy tensors into others."""
    for place, value in zip(into, values, strict=True):
        place.detach().copy_(value.detach())


class Parcel:
    """One message with room for such tensors, of any dtypes and devices; ``tensors`` are views of its bytes."""

    def __init__(self, like: Sequence[Tensor]) -> None:
        ends = list(accumulate((-(-each.nbytes // _ALIGNED) * _ALIGNED for each in like), initial=0))
        self.message = torch.zeros(max(ends[-1], _ALIGNED), dtype=torch.uint8)
        self.tensors = [
            self.message[start : start + each.nbytes].view(each.dtype).view(each.shape)
            for start, each in zip(ends, like, strict=False)
        ]


class Served:
    """Parameters that one server holds; the first server holds the module's buffers as well."""

    def __init__(self, parameters: Sequence[nn.Parameter], module: nn.Module | None) -> None:
        self.parameters, self._module = parameters, module
        self._parcel = Parcel([*parameters, *self.buffers])
        self.message = self._parcel.message  # of their values

    @property
    def buffers(self) -> Sequence[Tensor]:
        """Buffers that the module has now: a forward pass may put others in their place."""
        return [] if self._module is None else list(self._module.buffers())

    def pack(self) -> Tensor:
        """Return the message, with the values as they are now."""
        copy(self._parcel.tensors, [*self.parameters, *self.buffers])
        return self.message

    def unpack(self) -> None:
        """Take the values of a message that was received."""
        copy([*self.parameters, *self.buffers], self._parcel.tensors)


class Push:
    """What a worker sends a server for a shard of a batch: gradients and buffers, after the forward and backward."""

    def __init__(self, served: Served) -> None:
        self._served = served
        facts = torch.zeros(1 + len(served.parameters), dtype=torch.float64)
        parcel = Parcel([facts, *served.parameters, *served.buffers])
        self.message = parcel.message
        # The shard's fraction of the samples of its step, and for each parameter whether it has a gradient.
        self._facts, self._values = parcel.tensors[0], parcel.tensors[1:]

    def fill(self, weight: float) -> Tensor:
        """Return the message, with gradients taken out of the parameters."""
        there = [parameter.grad is not None for parameter in self._served.parameters]
        self._facts.copy_(torch.tensor([weight, *there], dtype=torch.float64))
        for place, parameter in zip(self._values, self._served.parameters, strict=False):
            if parameter.grad is not None:
                place.copy_(parameter.grad)
                parameter.grad = None
        copy(self.buffers, self._served.buffers)
        return self.message

    @property
    def weight(self) -> float:
        """The shard's fraction of the samples of its step."""
        return float(self._facts[0])

    @property
    def buffers(self) -> Sequence[Tensor]:
        """As the shard left them."""
        return self._values[len(self._served.parameters) :]

    def gradient(self, at: int) -> Tensor | None:
        """Return the gradient of a parameter, or ``None`` if the shard has none."""
        return self._values[at] if self._facts[1 + at] else None


def deal(module: nn.Module, servers: int) -> list[Served]:
    """Return what each server holds: whole parameters, the largest first, each to the server that has least."""
    parameters = list(module.parameters())
    held: list[list[int]] = [[] for _ in range(servers)]
    for at in sorted(range(len(parameters)), key=lambda at: -parameters[at].numel()):
        min(held, key=lambda mine: sum(parameters[other].numel() for other in mine)).append(at)
    return [Served([parameters[at] for at in sorted(mine)], None if n else module) for n, mine in enumerate(held)]


log = logging.getLogger(__name__)

_FOR_EVER = timedelta(days=365)  # a worker may compute, or all ranks may evaluate, for as long as they like


class Server:
    """Serves the workers. A thread for each worker takes in its messages; the main thread does all else.

    A shard of a batch is done once its gradients are here, or lost. A worker gets weights for a shard once all shards
    of steps more than ``staleness`` before it are done.

    Args:
        workers: their ranks; a step has as many shards.
        messages: where ranks record failures.
        lines: the connection to each worker, an inode; ``None`` where it is not known.
    """

    def __init__(
        self,
        world: World,
        workers: range,
        staleness: int,
        messages: Messages,
        served: Served,
        timeout_s: float,
        lines: Mapping[int, int | None],
    ) -> None:
        self.living, self._lines = list(workers), lines
        self._world, self._shards, self._staleness, self._timeout_s = world, len(workers), staleness, timeout_s
        self._messages, self._served = messages, served
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()  # what the main thread is to do
        self._free = count()  # the first server deals shards that have not been dealt beforehand
        self._asking: dict[int, int] = {}  # worker -> the shard that it wants weights for
        self._arrived: deque[tuple[int, Push | None]] = deque()  # done, but not yet in a step; None: lost
        self._listening = False
        self._first, self._done = 0, set[int]()  # the first shard that is not done; those after it that are

    def listen(self) -> None:
        """Begin to take in messages, unless that has begun."""
        listening, self._listening = self._listening, True
        for worker in () if listening else self.living:
            Thread(target=self._take_in, args=[worker], daemon=True).start()

    def _take_in(self, worker: int) -> None:
        """Wait for a worker's messages: it asks for weights, then sends gradients, and so on until it exits."""
        shard = torch.tensor([-1])  # the last one that is the worker's
        with suppress(RuntimeError, ValueError):  # its connection is closed, or this rank has left the group
            while True:
                asked = torch.empty_like(shard)
                self._receive(asked, worker, ASK)
                if int(asked) == ANY:
                    shard = torch.tensor([next(self._free)])
                    dist.send(shard, worker, tag=DEAL)
                    continue
                shard = asked
                self._inbox.put(partial(self._asking.__setitem__, worker, int(shard)))
                push = Push(self._served)
                self._receive(push.message, worker, GRADIENTS)
                self._inbox.put(partial(self._finish, int(shard), push))
        with suppress(RuntimeError, ValueError):  # the first server alone knows what it had dealt
            if self._world.is_main:
                self._inbox.put(partial(self._leave_out, worker, int(shard)))
                for server in range(1, self._world.world_size - self._shards):
                    dist.send(shard, server, tag=DEAL + worker)
            else:
                self._receive(shard, 0, DEAL + worker)
                self._inbox.put(partial(self._leave_out, worker, int(shard)))

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
                    with suppress(RuntimeError):  # it died, and its thread says so
                        send(weights, worker, tag=WEIGHTS, line=self._lines[worker])
            self._wait()
        step = sorted(self._arrived.popleft() for _ in range(self._shards))
        return [(shard, push) for shard, push in step if push is not None]

    def _wait(self) -> None:
        """Wait for a message."""
        try:
            act = self._inbox.get(timeout=self._timeout_s)
        except Empty:
            owing = [worker for worker in self.living if worker not in self._asking]
            raise RunFailed(
                f"Timed out after launcher.timeout_s={self._timeout_s:g} seconds without gradients from rank "
                f"{', '.join(map(str, owing))}.",
                unresponsive=owing,
            ) from None
        act()

    def _finish(self, shard: int, push: Push | None) -> None:
        self._arrived.append((shard, push))
        self._done.add(shard)
        while self._first in self._done:
            self._done.remove(self._first)
            self._first += 1

    def go_on_without(self, worker: int) -> None:
        """Wait until a worker that died is left out; raise what :meth:`_leave_out` raises."""
        while worker in self.living:
            self._wait()

    def _leave_out(self, worker: int, shard: int) -> None:
        """Leave out a worker that died, and say what is lost with it: the shard, unless that is done.

        Raises:
            RuntimeError: the run ends with the worker.
            RunFailed: it was the last one.
        """
        if not self._staleness or has_failed(self._messages, worker):
            raise RuntimeError(f"Connection closed by rank {worker}.")
        self.living.remove(worker)
        self._asking.pop(worker, None)
        lost = shard >= self._first and shard not in self._done
        if lost:
            self._finish(shard, None)
        if not self.living:
            raise RunFailed(f"Rank {worker} died, the last worker.", rank=worker)
        log.warning(
            "Rank %d died; %d of %d workers go on. Lost with it, out of %d shards of each batch: %s.",
            worker,
            len(self.living),
            self._shards,
            self._shards,
            f"1 of step {shard // self._shards + 1} since the start" if lost else "none",
        )

    def _receive(self, message: Tensor, source: int, tag: int) -> None:
        """Receive a rank's message, whenever it comes.

        Raises:
            RuntimeError: the rank has died, be it in the middle of the message.
        """
        receive(message, source, tag=tag, line=self._lines.get(source), patience=_FOR_EVER)
