"""What ranks send each other ends where a connection does, also in the middle of a large tensor."""

import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from threading import Thread

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store

from ddp_recipes.runtime.process import connections, disconnect
from ddp_recipes.runtime.world import World
from ddp_recipes.strategies import exchanges
from ddp_recipes.strategies.fsdp.order import Order, ReduceScatter
from ddp_recipes.testing import on_ranks
from helpers.marks import slow_but
from helpers.patience import patience

SIZE = 64 << 20  # numbers: more than any socket takes at once
ALLOWED_S = 20.0  # where a wait of gloo's takes ten minutes
MINUTES = timedelta(minutes=10)


def message(mine: Tensor, theirs: Tensor) -> None:
    exchanges.send(mine, 0) if dist.get_rank() else exchanges.receive(theirs, 1)


TRANSFERS: dict[str, Callable[[Tensor, Tensor], None]] = {
    "all to all": lambda mine, theirs: exchanges.exchanged(dist.all_to_all_single, theirs, mine),
    "broadcast": lambda mine, theirs: exchanges.exchanged(dist.broadcast, mine if dist.get_rank() else theirs, 1),
    "message": message,
}


def joined(world: World, store: Store | None) -> set[int]:
    """Join the other rank; return the connections to it."""
    before = connections()
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=2, timeout=MINUTES)
    dist.barrier()
    found = connections() - before
    exchanges.hold(found)
    return found


def cut_off(
    transfer: Callable[[Tensor, Tensor], None], world: World, store: Store | None, size: int = SIZE
) -> tuple[str, float]:
    """Hang up once the other rank's first numbers are here; return what this rank was told, and after how long."""
    held = joined(world, store)
    mine, theirs = torch.full([size], float(world.rank)), torch.zeros(size)  # what is not 0 came

    def hang_up() -> None:
        while not (theirs[0] or theirs[size // 2]):
            pass
        disconnect(held)

    if world.rank == 0:
        Thread(target=hang_up, daemon=True).start()
    began = time.monotonic()
    try:
        transfer(mine, theirs)
    except RuntimeError as error:
        return str(error), time.monotonic() - began
    return "", time.monotonic() - began


@pytest.mark.parametrize("name", slow_but(["message"], TRANSFERS, TRANSFERS))
def test_a_rank_is_told_of_a_connection_that_ends_while_it_sends_or_receives(name: str) -> None:
    for told, seconds in on_ranks(partial(cut_off, TRANSFERS[name]), 2, timeout_s=patience(120)):
        assert "onnection" in told
        assert seconds < patience(ALLOWED_S)


def gradients_of_replicas(mine: Tensor, theirs: Tensor) -> None:
    """Reduce a block of FSDP of which each replica is one rank."""
    alone, _ = dist.new_subgroups_by_enumeration([[0], [1]], timeout=MINUTES)
    assert isinstance(alone, dist.ProcessGroup)
    reduce = ReduceScatter(Order(("",), ordered=False), 0, dist.group.WORLD)
    reduce(theirs, mine, alone, dist.ReduceOp.SUM)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_rank_is_told_of_a_connection_that_ends_while_it_adds_up_gradients_of_replicas() -> None:
    """What gloo tells nobody of is a matter of the instant: a wait in five, of tensors of some megabytes."""
    for _ in range(16):
        held = on_ranks(partial(cut_off, gradients_of_replicas, size=1 << 20), 2, timeout_s=patience(120))
        assert max(seconds for _, seconds in held) < patience(ALLOWED_S)


def test_a_transfer_takes_as_long_as_the_other_rank_does() -> None:
    def late(transfer: Callable[[Tensor, Tensor], None], world: World, store: Store | None) -> float:
        joined(world, store)
        mine, theirs = torch.full([1 << 20], float(world.rank)), torch.zeros(1 << 20)
        if world.rank == 1:
            time.sleep(3 * exchanges.LOOK_S)
        transfer(mine, theirs)
        return float(theirs[-1])

    assert on_ranks(partial(late, TRANSFERS["all to all"]), 2, timeout_s=patience(60)) == [1.0, 1.0]
    assert on_ranks(partial(late, TRANSFERS["message"]), 2, timeout_s=patience(60)) == [1.0, 0.0]
