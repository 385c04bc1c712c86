"""All-reduce among the processes of one machine, through memory that they share.

gloo sends tensors through the loopback network, which takes several threads of each rank and a millisecond. Here each
rank writes its values where all can read them, tells the others so, and adds up what all have written.
"""

import mmap
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from itertools import combinations
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_recipes.runtime.phases import ALL_REDUCE, phase
from ddp_recipes.runtime.process import folder_for_sockets
from ddp_recipes.runtime.world import World
from ddp_recipes.strategies.collectives import broadcast

MOST_RANKS = 8  # each reads what all have put there: with many it would be quicker if each computed a slice of the sum
CHUNK = 1 << 20  # bytes that a rank puts there at once: small enough for the processor's cache
LONGEST_S = 1e6  # the longest timeout of a socket
_BYTE = b"\0"


class SharedMemory:
    """Means and sums of tensors over ranks. They are added in the order of ranks, so all get the same bits, in any run.

    Each rank has two places, which it uses in turns. A turn ends when all ranks have put something there, so nobody is
    two turns before another one: what a rank overwrites has been read by all.

    Args:
        links: a connection to each other rank, by rank. It ends with that rank.
        memory: the places, two times ``CHUNK`` bytes for each rank.
        timeout_s: how long another rank is waited for.
    """

    def __init__(self, rank: int, links: dict[int, socket.socket], memory: mmap.mmap, timeout_s: float) -> None:
        self._rank = rank
        self._links = links
        self._timeout_s = timeout_s
        self._places = torch.frombuffer(memory, dtype=torch.uint8).view(2, len(links) + 1, CHUNK)
        self._turn = 0
        for link in links.values():
            link.settimeout(min(timeout_s, LONGEST_S))

    def mean(self, tensor: Tensor) -> None:
        """Replace the numbers of a contiguous tensor by their means over ranks. A collective.

        Raises:
            RuntimeError: a rank exited or did not respond in time; names it.
        """
        self._add(tensor, 1 / (len(self._links) + 1))  # as DDP does by itself

    def sum(self, tensor: Tensor) -> None:
        """Replace them by their sums, like :meth:`mean`."""
        self._add(tensor, 1)

    def _add(self, tensor: Tensor, factor: float) -> None:
        places = self._places.view(tensor.dtype)
        ranks = places.shape[1]
        for chunk in torch.split(tensor.view(-1), places.shape[2]):
            self._turn = 1 - self._turn
            of_ranks = places[self._turn, :, : len(chunk)]
            torch.mul(chunk, factor, out=of_ranks[self._rank])
            self._meet()
            torch.add(of_ranks[0], of_ranks[1], out=chunk)
            for rank in range(2, ranks):
                chunk.add_(of_ranks[rank])

    def _meet(self) -> None:
        """Wait until all ranks are here."""
        rank = self._rank
        try:
            for rank in self._links:
                self._links[rank].send(_BYTE)
            for rank in self._links:
                if not self._links[rank].recv(1):
                    raise ConnectionResetError
        except TimeoutError:
            message = f"Timed out waiting {self._timeout_s:g} s for rank {rank} in an all-reduce."
            raise RuntimeError(message) from None
        except OSError:
            raise RuntimeError(f"Connection closed by rank {rank} in an all-reduce.") from None

    def hook(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket of gradients, as a communication hook of ``DistributedDataParallel``."""
        gradients = bucket.buffer()
        if gradients.is_sparse:
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook  # seldom needed

            return allreduce_hook(None, bucket)  # type: ignore[arg-type]  # its default: all ranks
        with phase(ALL_REDUCE):
            self.mean(gradients)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(gradients)
        return done

    def close(self) -> None:
        """Close the connections, by which the others see that this rank has left the group."""
        for link in self._links.values():
            link.close()


def join(world: World, timeout_s: float) -> SharedMemory | None:
    """Meet the other ranks in a place of this machine; return what they share. A collective of the process group.

    Returns:
        ``None``, on all ranks, where some are elsewhere (another machine or container), where they are too many, or
        where the system gives no memory to share.

    Raises:
        RuntimeError: a rank did not respond in time.
    """
    if not 1 < world.world_size == world.local_world_size <= MOST_RANKS or sys.platform != "linux":
        return None
    with ExitStack() as stack:
        door, path = stack.enter_context(socket.socket(socket.AF_UNIX)), ""
        door.settimeout(min(timeout_s, LONGEST_S))
        if world.is_main:
            with suppress(OSError):  # no folder for it: nobody comes in
                made_for_it = TemporaryDirectory(prefix="ddp_recipes_", dir=folder_for_sockets())  # of this user alone
                door.bind(place := f"{stack.enter_context(made_for_it)}/door")
                door.listen(MOST_RANKS)
                path = place
        path = broadcast(path, 0)
        made = _make_memory(world.world_size) if world.is_main else None
        able = torch.tensor(made is not None or (not world.is_main and door.connect_ex(path) == 0)).int()
        dist.all_reduce(able, dist.ReduceOp.MIN)
        if not able:
            if made is not None:
                os.close(made)
            return None
        try:
            memory, *links = _receive(door, world.rank) if made is None else _hand_out(door, world.world_size, made)
        except TimeoutError:
            raise RuntimeError(f"Timed out after {timeout_s:g} s of waiting for other ranks to share memory.") from None
    mapped = mmap.mmap(memory, 0)
    os.close(memory)
    others = [rank for rank in range(world.world_size) if rank != world.rank]
    sockets = {rank: socket.socket(fileno=link) for rank, link in zip(others, links, strict=True)}
    return SharedMemory(world.rank, sockets, mapped, timeout_s)


def _receive(door: socket.socket, rank: int) -> Sequence[int]:
    """Return this rank's descriptors, of what rank 0 makes."""
    door.send(bytes([rank]))
    return socket.recv_fds(door, 1, MOST_RANKS)[1]


def _make_memory(world_size: int) -> int | None:
    """Return the descriptor of memory for so many ranks, or ``None`` where the system gives none."""
    with suppress(OSError):
        memory = os.memfd_create("ddp_recipes")
        os.ftruncate(memory, 2 * world_size * CHUNK)
        return memory
    return None


def _hand_out(door: socket.socket, world_size: int, memory: int) -> Sequence[int]:
    """Make a connection between any two ranks; return rank 0's descriptors, and send the others theirs."""
    links: dict[int, dict[int, socket.socket]] = {rank: {} for rank in range(world_size)}
    for one, other in combinations(range(world_size), 2):
        links[one][other], links[other][one] = socket.socketpair()
    expected = set(range(1, world_size))
    while expected:
        visitor, _ = door.accept()
        with visitor:
            visitor.settimeout(door.gettimeout())
            rank = visitor.recv(1)[0]
            theirs = links.pop(rank)
            socket.send_fds(visitor, [_BYTE], [memory, *(theirs[other].fileno() for other in sorted(theirs))])
            expected.remove(rank)
            for link in theirs.values():
                link.close()
    return [memory, *(links[0][other].detach() for other in sorted(links[0]))]
