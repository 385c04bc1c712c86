"""The arithmetic of a plan, against counting."""

import pytest

from ddp_recipes.model_parallel.timeline import bubble, order, timeline
from ddp_recipes.order import BatchPlan
from ddp_recipes.planning import counts
from ddp_recipes.strategies.base import Exchange
from ddp_recipes.world import World

PLANS = [
    BatchPlan(61, 8, 3),
    BatchPlan(61, 8, 3, drop_last=True),
    BatchPlan(61, 61, 4),
    BatchPlan(61, 10, 12, max_batches=4),
    BatchPlan(60, 10, 2),
]


@pytest.mark.parametrize("plan", PLANS)
def test_samples_are_those_that_batches_hold(plan: BatchPlan) -> None:
    totals = [plan.total(batch) for batch in range(plan.num_batches)]
    assert counts.epoch_of(plan) == sum(totals)
    for part in range(plan.parts):
        shares = [plan.share(batch, part) for batch in range(plan.num_batches)]
        assert counts.samples_of(plan, part) == sum(shares)
    for batches in range(2 * plan.num_batches + 1):
        assert counts.samples_seen(plan, batches) == sum((3 * totals)[:batches])


@pytest.mark.parametrize("accumulate", [1, 2, 3, 9])
def test_batches_are_those_that_steps_take(accumulate: int) -> None:
    groups = [min(accumulate, 7 - first) for first in range(0, 7, accumulate)]
    for steps in range(2 * len(groups) + 1):
        assert counts.batches_of(steps, 7, accumulate) == sum((3 * groups)[:steps])


def turns(stages: int, micro_batches: int) -> float:
    """Return the idle share of the first stage, counted turn by turn: forward all, then backward all."""
    length = 2 * (micro_batches + stages - 1)
    return 1 - 2 * micro_batches / length


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (2, 1), (2, 4), (4, 16), (8, 3)])
def test_the_bubble_is_what_counting_turns_gives(stages: int, micro_batches: int) -> None:
    for schedule in ("gpipe", "1f1b"):
        cells = timeline(order(schedule, stages, stages, micro_batches), stages)
        assert bubble(cells) == pytest.approx(turns(stages, micro_batches))
    if micro_batches % stages == 0:  # in whole rounds
        interleaved = timeline(order("interleaved_1f1b", 2 * stages, stages, micro_batches), 2 * stages)
        assert bubble(interleaved) == pytest.approx((stages - 1) / (2 * micro_batches + stages - 1))


def test_what_leaves_a_node_bounds_the_time() -> None:
    exchange, gigabyte = Exchange(all_reduced=10**9), 8.0
    alone = World(world_size=1, local_world_size=1)
    node = World(world_size=8, local_world_size=8)
    nodes = World(world_size=32, local_world_size=8)
    assert counts.link_seconds(exchange, alone, gigabyte) == 0
    assert counts.link_seconds(exchange, node, gigabyte) == pytest.approx(2 * 7 / 8)
    assert counts.link_seconds(exchange, nodes, gigabyte) == pytest.approx(2 * 3 / 4)
    exact = Exchange(scattered=12 * 10**9, gathered=10**9 // 8)
    assert counts.sent(exact, node) == pytest.approx(12 * 10**9 * 7 / 8 + 7 / 8 * 10**9)
