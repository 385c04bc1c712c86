"""Ranks start together or not at all."""

import pytest
from torch.distributed import Store

from ddp_recipes import RequestError, RunFailed
from ddp_recipes.runtime.control import Control
from ddp_recipes.runtime.messages import Messages
from ddp_recipes.runtime.world import World
from ddp_recipes.testing import on_ranks


@pytest.mark.slow
def test_what_differs_is_named_on_every_rank() -> None:
    def agree(world: World, store: Store | None) -> str:
        facts = {"version of ddp_recipes": f"1.{world.rank // 2}", "digest of the config": "abc"}
        with pytest.raises(RequestError) as refused:
            Control(world, Messages(store), 20).agree(None, facts)
        return str(refused.value)

    said = on_ranks(agree, 3)
    assert len(set(said)) == 1
    assert "version of ddp_recipes: 1.0 on rank 0, 1.1 on rank 2" in said[0]
    assert "digest of the config" not in said[0]


@pytest.mark.slow
def test_what_one_rank_was_refused_all_are() -> None:
    def agree(world: World, store: Store | None) -> str:
        error = RequestError("no such folder") if world.rank == 1 else None
        try:
            Control(world, Messages(store), 20).agree(error, {})
        except RequestError as refused:
            return str(refused)
        return str(error)

    assert on_ranks(agree, 3) == ["no such folder"] * 3


def test_a_rank_that_is_missing_is_named() -> None:
    def agree(world: World, store: Store | None) -> str:
        if world.rank == 1:
            return "went elsewhere"
        with pytest.raises(RunFailed) as missed:
            Control(world, Messages(store), 1).agree(None, {})
        return str(missed.value)

    said = on_ranks(agree, 3)
    assert said[0] == said[2]
    assert said[0].startswith("Rank 1 of 3 did not arrive within launcher.timeout_s=1 seconds")
