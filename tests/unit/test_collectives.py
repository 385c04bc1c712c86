"""What ranks exchange beside gradients: plain data and tensors, which nobody unpickles."""

import gc
import math
import pickle
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import example, given
from torch.distributed import TCPStore

from ddp_recipes.errors import RunFailed
from ddp_recipes.runtime.world import World
from ddp_recipes.strategies.collectives import broadcast, gather, pack, unpack
from ddp_recipes.testing import on_ranks
from helpers.patience import patience
from helpers.states import nested, same

NESTED: dict[Any, Any] = {
    0: {"step": torch.tensor(3.0), "exp_avg": torch.arange(6.0).view(2, 3).bfloat16(), "none": None},
    "names": ["a", "ü"],
    "pair": (1, math.inf, (True, False)),
    "empty": [torch.zeros(0, 4), [], (), {}],
    "contiguous, with strides": torch.arange(4.0).view(2, 2)[:1, ::2][:, :1],
    "turned": torch.arange(6).view(2, 3).t(),
    "odd": [torch.tensor([True, False, True]), torch.tensor([1 + 2j]), torch.tensor(2**62)],
}


@given(nested())
@example(NESTED)
def test_nested_data_come_back_as_they_were(value: Any) -> None:
    assert same(unpack(pack(value)), value)


def test_what_would_take_a_pickle_is_refused() -> None:
    for value in ({1, 2}, object(), pickle.Pickler, b"bytes"):
        with pytest.raises(TypeError, match="Ranks exchange tensors and plain data"):
            pack({"here": value})


def test_junk_is_no_value() -> None:
    """Two thousand messages, of which each has some bytes changed, or is cut short."""
    random, sound = Random(16), pack(NESTED)
    read = refused = 0
    for _ in range(2000):
        message = sound[: random.randrange(len(sound) + 1)].clone() if random.random() < 0.2 else sound.clone()
        for _ in range(random.randrange(1, 8)):
            if len(message):
                message[random.randrange(len(message))] = random.randrange(256)
        try:
            unpack(message)
            read += 1
        except RunFailed:
            refused += 1
    assert min(read, refused) > 0


def test_ranks_gather_and_broadcast_values_of_any_size() -> None:
    def exchange(world: World, store: torch.distributed.Store | None) -> Any:
        assert store is not None
        torch.distributed.init_process_group("gloo", store=store, rank=world.rank, world_size=world.world_size)
        gathered = gather([world.rank, torch.full((world.rank * 5,), world.rank)])
        text = broadcast({"from": world.rank} if world.rank == 1 else None, 1)
        torch.distributed.destroy_process_group()
        return None if gathered is None else [(rank, len(tensor)) for rank, tensor in gathered], text

    first, *others = on_ranks(exchange, 3)
    assert first == ([(0, 0), (1, 5), (2, 10)], {"from": 1})
    assert others == [(None, {"from": 1})] * 2


LARGE: dict[str, Any] = {
    "turned": torch.arange(40_000.0).view(200, 200).t(),
    "between": [torch.tensor(3), "text"],
    "half": torch.arange(70_000).bfloat16(),
    "flags": torch.arange(100_000) % 3 == 0,
}


def test_large_tensors_are_gathered_with_the_rest_in_their_order() -> None:
    def of_rank(rank: int) -> Any:
        return {**LARGE, "own": torch.full((30_000 * rank,), rank)}

    def exchange(world: World, store: torch.distributed.Store | None) -> bool:
        assert store is not None
        torch.distributed.init_process_group("gloo", store=store, rank=world.rank, world_size=world.world_size)
        gathered = gather(of_rank(world.rank))
        torch.distributed.destroy_process_group()
        return gathered is None if world.rank else same(gathered, [of_rank(rank) for rank in range(3)])

    assert on_ranks(exchange, 3) == [True, True, True]


def test_large_tensors_are_broadcast_with_the_rest_in_their_order() -> None:
    def exchange(world: World, store: torch.distributed.Store | None) -> bool:
        assert store is not None
        torch.distributed.init_process_group("gloo", store=store, rank=world.rank, world_size=world.world_size)
        received = broadcast(LARGE if world.rank == 1 else None, 1)
        torch.distributed.destroy_process_group()
        return same(received, LARGE)

    assert on_ranks(exchange, 2) == [True, True]


def test_a_forked_rank_collects_nothing_that_only_its_parent_can_end() -> None:
    def leave_a_store_to_the_collector() -> None:
        cycle: list[Any] = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
        cycle.append(cycle)

    leave_a_store_to_the_collector()
    assert on_ranks(lambda world, store: gc.collect() >= 0, 2, timeout_s=patience(20)) == [True, True]
