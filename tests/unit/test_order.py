"""The order of samples: a shuffle that is computed, and a plan that deals every sample out once."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from hypothesis import example, given, strategies as st
from numpy.typing import NDArray

from ddp_recipes.data import order as module
from ddp_recipes.data.order import BatchPlan, Drawn, Indices, Order, Sequential, Shuffled, draw, permute
from ddp_recipes.runtime.seeding import key
from helpers.marks import quick_each

BLOCK, BATCHES = module._BLOCK, module._BATCHES
SEEDS = st.integers(0, 2**63 - 1)


@pytest.fixture(scope="module", autouse=True)
def small_blocks() -> Iterator[None]:
    """Let plans of a few hundred samples have many blocks, which batches begin and end anywhere in."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BLOCK", 60)
        patch.setattr(module, "_BATCHES", 4)
        yield


def shuffled(n: int, seed: int = 0) -> NDArray[np.int64]:
    return permute(np.arange(n, dtype=np.uint64), n, seed).astype(np.int64)


def epoch_of(plan: BatchPlan, epoch: int = 0, shard: int = 0) -> list[int]:
    return [sample for batch in range(plan.num_batches) for sample in plan.indices(epoch, batch, shard).tolist()]


# --- permute ---------------------------------------------------------------------------------------------------------


@given(st.integers(1, 70_000) | st.integers(1, 300), SEEDS)
@example(65_536, 0)
@example(65_537, 2**63 - 1)
def test_permute_is_a_bijection_at_any_size(n: int, seed: int) -> None:
    assert np.array_equal(np.sort(shuffled(n, seed)), np.arange(n))


@given(st.data(), st.integers(1, 2000), SEEDS)
def test_permute_does_not_depend_on_what_else_is_asked_for(data: st.DataObject, n: int, seed: int) -> None:
    some = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=2, max_size=20)), dtype=np.uint64)
    some = some[: len(some) // 2 * 2].reshape(2, -1)
    assert np.array_equal(permute(some, n, seed).astype(np.int64), shuffled(n, seed)[some.astype(np.int64)])


@given(st.integers(2**33, 2**47), SEEDS)
def test_permute_reaches_far_into_sizes_that_no_list_could_hold(n: int, seed: int) -> None:
    samples = permute(np.arange(3000, dtype=np.uint64), n, seed)
    assert len(np.unique(samples)) == 3000
    assert samples.max() < n
    assert samples.max() > n - n // 50, "it reaches the end"  # a fair shuffle does not with a chance of e^-60


def test_another_seed_is_another_shuffle() -> None:
    orders = {tuple(shuffled(20, seed)) for seed in range(500)}
    assert len(orders) == 500


# Whether shuffles look random: counts of cells that should be equally frequent, by chi-square. Seeds are fixed, so
# these pass or fail for good; a fair shuffle fails the bound with a chance of about one in a million.


def assert_uniform(cells: NDArray[np.int64], num_cells: int, freedom: int | None = None) -> None:
    counts = np.bincount(cells.ravel(), minlength=num_cells)
    expected = cells.size / num_cells
    assert expected > 5, "chi-square needs more"
    freedom = freedom or num_cells - 1
    chi_square = ((counts - expected) ** 2 / expected).sum()
    deviations = (chi_square - freedom) / np.sqrt(2 * freedom)
    assert abs(deviations) < 5, f"chi-square {chi_square:.0f} with {freedom} degrees of freedom"


def orders(n: int, count: int, keys: Callable[[int], int]) -> NDArray[np.int64]:
    return np.stack([shuffled(n, keys(number)) for number in range(count)])


@pytest.mark.parametrize(
    "keys",
    quick_each(2, [lambda number: key(42, number), lambda number: number]),
    ids=["epochs 0, 1, …", "seeds 0, 1, …"],
)
def test_shuffles_are_uniform_in_places_pairs_and_steps(keys: Callable[[int], int]) -> None:
    for n, count in ((5, 1000), (16, 1500), (23, 2600)):
        table = orders(n, count, keys)
        # Rows and columns of the table of counts are fixed: a permutation has each once.
        assert_uniform(table + n * np.arange(n), n * n, (n - 1) ** 2)
        first, second = table[:, 2], table[:, 3]
        assert_uniform(first * (n - 1) + second - (second > first), n * (n - 1))
    n = 10_007
    table = orders(n, 8, keys)
    steps = (table[:, 1:] - table[:, :-1]) % n
    assert_uniform(steps * 64 // n, 64)


def test_epochs_are_strangers() -> None:
    n = 40_000
    table = orders(n, 4, lambda epoch: key(42, epoch))
    for one, other in pairwise(table):
        assert_uniform((one * 16 // n) * 16 + other * 16 // n, 256, 225)
        assert_uniform((one - other) % n * 64 // n, 64)


def test_positions_and_samples_are_strangers() -> None:
    n = 40_000
    for seed in range(4):
        assert_uniform((np.arange(n) * 16 // n) * 16 + shuffled(n, seed) * 16 // n, 256, 225)


# --- BatchPlan -------------------------------------------------------------------------------------------------------


@st.composite
def plans(drawn: st.DrawFn, /, kind: type | tuple[type, ...] | None = None) -> BatchPlan:
    """Plans of any kind but those that drop or limit."""
    n = drawn(st.integers(1, 400))
    weights = np.resize(np.array(drawn(st.lists(st.integers(0, 5), min_size=1, max_size=7)), dtype=np.float64), n)
    weights[drawn(st.integers(0, n - 1))] += 1
    seed = drawn(SEEDS)
    orders: list[Order] = [Sequential(n), Shuffled(n, seed), Drawn(weights, seed)]
    given = {
        "order": drawn(st.sampled_from([each for each in orders if kind is None or isinstance(each, kind)])),
        "global_batch_size": drawn(st.integers(1, 100)),
        "num_shards": drawn(st.integers(1, 9)),
        "sharding": drawn(st.sampled_from(["contiguous", "strided"])),
    }
    return BatchPlan(**given)  # type: ignore[arg-type]


@given(plans((Sequential, Shuffled)), st.integers(0, 5))
def test_every_sample_comes_once_in_shards_of_even_size(plan: BatchPlan, epoch: int) -> None:
    shards = range(plan.num_shards)
    dealt = [sample for shard in shards for sample in epoch_of(plan, epoch, shard)]
    assert sorted(dealt) == list(range(plan.num_samples))
    for number in range(plan.num_batches):
        sizes = [plan.size(number, shard) for shard in shards]
        assert sizes == [len(plan.indices(epoch, number, shard)) for shard in shards]
        assert sum(sizes) == plan.size(number)
        assert max(sizes) - min(sizes) <= 1


@given(plans(), st.integers(0, 5))
def test_a_step_has_the_same_samples_in_any_shards(plan: BatchPlan, epoch: int) -> None:
    """Weighted ones, too; and they are dealt as ``sharding`` is called. A batch may lie across blocks."""
    whole = replace(plan, num_shards=1)
    assert plan.num_batches == whole.num_batches
    for number, of in product(range(plan.num_batches), ("indices", "positions")):
        arguments = (epoch, number) if of == "indices" else (number,)
        expected = getattr(whole, of)(*arguments)
        cut = [getattr(plan, of)(*arguments, shard) for shard in range(plan.num_shards)]
        if plan.sharding == "contiguous":
            assert torch.equal(torch.cat(cut), expected)
        else:
            assert all(torch.equal(part, expected[shard :: plan.num_shards]) for shard, part in enumerate(cut))


@given(plans(), st.integers(0, 5), st.data())
def test_whole_batches_in_a_row_are_those_one_by_one(plan: BatchPlan, epoch: int, data: st.DataObject) -> None:
    shard, batches = data.draw(st.integers(0, plan.num_shards)), plan.num_samples // plan.global_batch_size
    start = 0
    while start < batches:
        found = plan.indices_of(epoch, range(start, batches), shard)
        expected = [plan.indices(epoch, start + number, shard) for number in range(len(found))]
        assert torch.equal(found, torch.stack(expected))
        start += len(found)


@given(plans())
def test_a_shard_beyond_the_last_is_empty(plan: BatchPlan) -> None:
    """For a rank that computes no shard of a batch."""
    beyond = plan.num_shards
    assert [plan.size(number, beyond) for number in range(plan.num_batches)] == [0] * plan.num_batches
    assert epoch_of(plan, 0, beyond) == []
    assert [len(plan.positions(number, beyond)) for number in range(plan.num_batches)] == [0] * plan.num_batches


@given(plans(), st.integers(0, 60))
def test_drop_last_and_limited_cut_the_end_off(plan: BatchPlan, limit: int) -> None:
    full, rest = divmod(plan.num_samples, plan.global_batch_size)
    for cut, number in ((replace(plan, drop_last=True), full), (plan.limited(limit), min(limit, full + (rest > 0)))):
        assert cut.num_batches == number
        for batch, shard in product(range(number), range(plan.num_shards)):
            assert torch.equal(cut.indices(1, batch, shard), plan.indices(1, batch, shard))
            assert cut.size(batch, shard) == plan.size(batch, shard)


@given(plans(), st.data())
def test_order_does_not_depend_on_who_asks_when(plan: BatchPlan, data: st.DataObject) -> None:
    calls = st.tuples(st.integers(0, 3), st.integers(0, plan.num_batches - 1), st.integers(0, plan.num_shards - 1))
    for call in data.draw(st.lists(calls, max_size=8)):
        assert torch.equal(plan.indices(*call), replace(plan).indices(*call))


def test_order_differs_by_epoch_and_by_seed() -> None:
    weights = np.arange(1, 101, dtype=np.float64)
    of_seed: list[Callable[[int], Order]] = [lambda seed: Shuffled(100, seed), lambda seed: Drawn(weights, seed)]
    for order in of_seed:
        plans = [BatchPlan(order(seed), 30, drop_last=True) for seed in (1, 2)]
        orders = [epoch_of(plan, epoch) for plan in plans for epoch in (0, 1)]
        assert len({tuple(order) for order in orders}) == 4
        assert len({frozenset(order) for order in orders}) == 4, "other epochs drop others"


def test_a_batch_lies_across_blocks_of_their_real_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BLOCK", BLOCK)
    monkeypatch.setattr(module, "_BATCHES", BATCHES)
    plan, expected = BatchPlan(Shuffled(200_000, 9), 50_000, 2), shuffled(200_000, key(9, 1))
    assert epoch_of(plan, 1, 1) == expected.reshape(4, 2, -1)[:, 1].ravel().tolist()
    small = BatchPlan(Shuffled(20_000, 9), 3)
    assert epoch_of(small, 1) == shuffled(20_000, key(9, 1)).tolist()


def test_the_first_batch_is_computed_alone_for_it_is_waited_for() -> None:
    asked: list[int] = []

    class Counted(Shuffled):
        def samples(self, epoch: int, positions: Indices) -> Indices:
            asked.append(len(positions))
            return super().samples(epoch, positions)

    plan, same = BatchPlan(Counted(600, 9), 12), BatchPlan(Shuffled(600, 9), 12)
    found = [plan.indices(1, batch).tolist() for batch in (7, 7, 8)]
    assert asked == [12, 48, 48], "then by blocks"
    assert found == [same.indices(1, 8 - number).tolist() for number in (1, 1, 0)]


# --- weights ---------------------------------------------------------------------------------------------------------


@given(plans(Drawn), st.integers(0, 3))
def test_weighted_draws_depend_on_place_and_key_and_weigh_something(plan: BatchPlan, epoch: int) -> None:
    assert isinstance(plan.order, Drawn)
    weights, seed = plan.order.weights, plan.order.seed
    places = np.arange(plan.num_samples, dtype=np.uint64)
    expected = draw(places, np.cumsum(weights), key(seed, epoch)).astype(np.int64)
    assert epoch_of(replace(plan, num_shards=1), epoch) == expected.tolist(), "whatever block a place is in"
    assert draw(places[::-3], np.cumsum(weights), key(seed, epoch)).tolist() == expected[::-3].tolist()
    assert (weights[expected] > 0).all()


def test_weighted_samples_come_as_often_as_they_weigh() -> None:
    weights = np.array([0, 1, 2, 0, 5, 0], dtype=np.float64)
    plan = BatchPlan(Drawn(weights, 3), 6)
    drawn = np.concatenate([epoch_of(plan, epoch) for epoch in range(2000)])
    counts = np.bincount(drawn, minlength=6)
    assert counts / counts.sum() == pytest.approx(weights / 8, abs=0.015)
    assert len({tuple(epoch_of(plan, epoch)) for epoch in range(100)}) > 50
