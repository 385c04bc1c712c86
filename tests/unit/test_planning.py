"""The arithmetic of a plan, against counting."""

import pytest

from ddp_recipes.data.order import BatchPlan, Sequential
from ddp_recipes.model_parallel.timeline import bubble, order, timeline
from ddp_recipes.runtime.world import World
from ddp_recipes.strategies.base import Collective
from ddp_recipes.tools.dry_run import counts

PLANS = [
    BatchPlan(Sequential(61), 8, 3),
    BatchPlan(Sequential(61), 8, 3, drop_last=True),
    BatchPlan(Sequential(61), 61, 4),
    BatchPlan(Sequential(61), 10, 12, max_batches=4),
    BatchPlan(Sequential(60), 10, 2),
]


@pytest.mark.parametrize("plan", PLANS)
def test_samples_are_those_that_batches_hold(plan: BatchPlan) -> None:
    totals = [plan.size(batch) for batch in range(plan.num_batches)]
    assert counts.samples_of(plan) == sum(totals)
    for shard in range(plan.num_shards):
        sizes = [plan.size(batch, shard) for batch in range(plan.num_batches)]
        assert counts.samples_of(plan, shard) == sum(sizes)


@pytest.mark.parametrize("accumulate", [1, 2, 3, 9])
@pytest.mark.parametrize("plan", PLANS)
def test_samples_seen_are_those_of_the_batches_that_steps_take(plan: BatchPlan, accumulate: int) -> None:
    totals = [plan.size(batch) for batch in range(plan.num_batches)]
    steps = [sum(totals[first : first + accumulate]) for first in range(0, len(totals), accumulate)]
    for taken in range(2 * len(steps) + 1):
        assert counts.samples_seen(plan, taken, accumulate) == sum((3 * steps)[:taken])


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


def leaving(collectives: list[Collective], world: World, at_link: int, batches: int = 1) -> float:
    """Return what leaves a link, given the collectives that rank 0 takes part in."""
    every = [one for each in collectives for one in counts.of_all_ranks(each, world.world_size)]
    return counts.leaving(every, {"batch": batches, "step": 1}, at_link)


def test_what_leaves_a_node_is_counted() -> None:
    alone = World(world_size=1, local_world_size=1)
    node = World(world_size=8, local_world_size=8)
    nodes = World(world_size=32, local_world_size=8)
    for world, at_link, share in ((alone, 1, 0.0), (node, 1, 2 * 7 / 8), (nodes, 8, 2 * 3 / 4)):
        reduced = [Collective("all_reduced", 10**9, range(world.world_size))]
        assert leaving(reduced, world, at_link) == pytest.approx(share * 10**9)
    exact = [Collective("scattered", 12 * 10**9, range(8)), Collective("gathered", 10**9 // 8, range(8))]
    assert leaving(exact, node, 1) == pytest.approx(12 * 10**9 * 7 / 8 + 7 / 8 * 10**9)


def test_what_leaves_a_node_of_sharded_replicas() -> None:
    """Four nodes of 8 ranks, a replica on each, gathers of each of 2 batches; then one on two nodes each."""
    world = World(world_size=32, local_world_size=8)
    for ranks, gathered, reduced in ((8, 0, 8 * 2 * 3 / 4), (16, 8 * 2 * 10, 8 * 2 * 1 / 2)):
        within = [Collective("gathered", 10, range(ranks), "batch")]
        across = [Collective("all_reduced", 1, range(0, 32, ranks))]
        assert leaving(within, world, 8, batches=2) == gathered
        assert leaving(across, world, 8) == pytest.approx(reduced)
        assert leaving(within, world, 1, batches=2) == 2 * 10 * (ranks - 1)


def test_what_leaves_a_node_of_pipelines() -> None:
    """Three processes, with 100, 200 and 300 bytes of gradients; 10 and 20 cross forward, 1 and 2 backward."""

    def leaving(world_size: int, at_link: int) -> float:
        sent = counts.of_pipelines([100, 200, 300], [(10, 1), (20, 2)], world_size)
        return counts.leaving(sent, {"batch": 1, "step": 1}, at_link)

    assert leaving(3, 1) == 21  # one replica: the middle process passes on most
    assert leaving(6, 1) == 302  # two: the last one sends its gradients, 2 (2 - 1) / 2 of them
    assert leaving(6, 6) == 0
    assert leaving(6, 3) == 600  # a replica on each node: all of the model's gradients
    # The second replica begins on the second node: the third one has 200, 300 and 1 to send.
    assert leaving(6, 2) == 501
