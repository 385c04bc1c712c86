"""Sums in a fixed order: the same bits however shards are dealt to ranks, which are threads here."""

import mmap
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

from ddp_recipes.errors import RequestError
from ddp_recipes.runtime.world import World
from ddp_recipes.strategies.ddp import shared_memory
from ddp_recipes.strategies.ddp.shared_memory import SharedMemory
from ddp_recipes.strategies.ddp_exact import ordered_sum
from ddp_recipes.strategies.ddp_exact.ordered_sum import OrderedSum
from ddp_recipes.strategies.ddp_exact.settings import FixedShardsSettings
from helpers.states import same

BOUND_S = 30  # for another thread


class Threads:
    """The collectives of ``torch.distributed`` that ordered sums take, among threads."""

    def __init__(self, ranks: int) -> None:
        self._rank, self._barrier, self._given = threading.local(), threading.Barrier(ranks), [torch.empty(0)] * ranks

    def _exchange(self, mine: Tensor) -> list[Tensor]:
        self._given[self._rank.number] = mine.clone()
        self._barrier.wait(BOUND_S)
        given = [*self._given]
        self._barrier.wait(BOUND_S)
        return given

    def all_to_all_single(self, received: Tensor, rows: Tensor, async_op: bool) -> Any:
        received.copy_(torch.stack([given[self._rank.number] for given in self._exchange(rows)]))
        return SimpleNamespace(wait=lambda timeout: None)

    def all_gather_single(self, into: Tensor, mine: Tensor) -> None:
        into.copy_(torch.cat(self._exchange(mine)))

    def broadcast(self, tensor: Tensor, src: int, async_op: bool) -> None:
        tensor.copy_(self._exchange(tensor)[src])

    def of_ranks(self, work: Callable[[int], Any]) -> list[Any]:
        """Return what each rank's work does."""

        def start(rank: int) -> Any:
            self._rank.number = rank
            return work(rank)

        with ThreadPoolExecutor(len(self._given)) as pool:
            return list(pool.map(start, range(len(self._given))))


class Net(nn.Module):
    """Parameters and buffers of several shapes and dtypes."""

    mean: Tensor
    count: Tensor

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        for number, size in enumerate(sizes):
            dtype = (torch.float32, torch.float64)[number % 2]
            self.register_parameter(f"p{number}", nn.Parameter(torch.zeros(size, 2, dtype=dtype)))
        self.register_buffer("mean", torch.arange(3.0))
        self.register_buffer("count", torch.tensor(7))


def moved(net: Net, step: int, shard: int, without: frozenset[tuple[int, int]]) -> None:
    """Do what a shard does: set gradients, but for some, and move buffers."""
    generator = torch.Generator().manual_seed(1000 * step + shard)
    for number, parameter in enumerate(net.parameters()):
        values = torch.randn(parameter.shape, dtype=torch.float64, generator=generator) * 10.0 ** (3 * shard % 7)
        parameter.grad = None if (shard, number) in without else values.to(parameter.dtype)
    net.mean += torch.randn(3, generator=generator)
    net.count += shard + 1


def summed(net: Net, world: World, shards: int, without: frozenset[tuple[int, int]], steps: int = 2) -> list[Any]:
    """Return the gradients and buffers of a rank after each step."""
    ordered, found = OrderedSum(net, world, shards // world.world_size), []
    for step in range(steps):
        for number in range(shards // world.world_size):
            ordered.begin()
            moved(net, step, number * world.world_size + world.rank, without)
            ordered.take(1 / shards)
        ordered.reduce()
        grads = [None if each.grad is None else each.grad.clone() for each in net.parameters()]
        found.append([*grads, *(each.clone() for each in net.buffers())])
    return found


def in_order(net: Net, shards: int, without: frozenset[tuple[int, int]], steps: int = 2) -> list[Any]:
    """Return the sums as they are defined: shard after shard."""
    found = []
    for step in range(steps):
        sums: list[Tensor | None] = [None for _ in net.parameters()]
        mean, count, moves, first = net.mean.clone(), net.count.clone(), torch.full((3,), -0.0), net.count
        for shard in range(shards):
            net.mean, net.count = mean.clone(), count.clone()
            moved(net, step, shard, without)
            grads = [parameter.grad for parameter in net.parameters()]
            sums = [b if a is None else a if b is None else a + b for a, b in zip(sums, grads, strict=True)]
            moves += (net.mean - mean) * (1 / shards)
            first = net.count if shard == 0 else first
        net.mean, net.count = mean + moves, first
        found.append([*sums, net.mean, net.count])
    return found


@given(
    st.integers(1, 3).flatmap(lambda each: st.tuples(st.just(each), st.integers(1, 4))),
    st.lists(st.integers(0, 40), min_size=1, max_size=3),
    st.frozensets(st.tuples(st.integers(0, 11), st.integers(0, 2)), max_size=30),
    st.sampled_from([1, 1 << 10, 1 << 19]),
)
def test_ordered_sums_do_not_depend_on_how_shards_are_dealt(
    dealt: tuple[int, int], sizes: list[int], without: frozenset[tuple[int, int]], together: int
) -> None:
    """Gradients, of which some are missing in some shards or in all, and buffers; rows go one or more at once."""
    each, ranks = dealt
    expected = in_order(Net(sizes), each * ranks, without)
    assert same(summed(Net(sizes), World(), each * ranks, without), expected)
    threads = Threads(ranks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ordered_sum, "dist", threads)
        patch.setattr(ordered_sum, "all_gather_single", threads.all_gather_single)
        patch.setattr(ordered_sum, "_TOGETHER", together)
        found = threads.of_ranks(
            lambda rank: summed(Net(sizes), World(rank, ranks, rank, ranks), each * ranks, without)
        )
    assert all(same(of_rank, expected) for of_rank in found)


@given(
    st.integers(2, 6),
    st.lists(st.integers(1, 3000), min_size=1, max_size=3),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64]),
)
def test_sums_in_shared_memory_are_those_in_the_order_of_ranks(
    ranks: int, sizes: list[int], dtype: torch.dtype
) -> None:
    def numbers(rank: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(rank)
        return [(torch.randn(size, generator=generator) * 10**rank).to(dtype) for size in sizes]

    links: list[dict[int, socket.socket]] = [{} for _ in range(ranks)]
    for one, other in combinations(range(ranks), 2):
        links[one][other], links[other][one] = socket.socketpair()

    def work(rank: int) -> list[Tensor]:
        shared, mine = SharedMemory(rank, links[rank], memory, BOUND_S), numbers(rank)
        for tensor in mine:
            (shared.mean if dtype.is_floating_point else shared.sum)(tensor)
            shared.sum(tensor)
        return mine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_memory, "CHUNK", 4096)
        memory = mmap.mmap(-1, 2 * ranks * 4096)
        found = Threads(ranks).of_ranks(work)
    for each in links:
        for link in each.values():
            link.close()
    factor = 1 / ranks if dtype.is_floating_point else 1
    expected = []
    for of_ranks in zip(*map(numbers, range(ranks)), strict=True):
        for by in (factor, 1):
            total = of_ranks[0] * by
            for each in of_ranks[1:]:
                total = total + each * by
            of_ranks = (total,) * ranks
        expected.append(total)
    assert all(same(of_rank, expected) for of_rank in found)


@given(st.integers(1, 64), st.integers(1, 64))
def test_fixed_shards_are_dealt_evenly_or_refused(shards: int, ranks: int) -> None:
    settings = FixedShardsSettings(shards=shards)
    if shards % ranks:
        with pytest.raises(RequestError) as refusal:
            settings.batch_shards(World(0, ranks))
        divisors = ", ".join(str(size) for size in range(1, shards + 1) if shards % size == 0)
        assert f"Use {divisors} processes" in str(refusal.value)
        return
    dealt = [settings.batch_shards(World(rank, ranks)) for rank in range(ranks)]
    assert sorted(number for each in dealt for number in each.numbers) == list(range(shards))
