"""The order of samples: a shuffle that is computed, and a plan that deals every sample out once."""

from collections.abc import Callable
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ddp_recipes.data.batch_plan import BatchPlan, permute
from ddp_recipes.runtime.seeding import key

SIZES = [*range(1, 130), 1000, 1797, 4095, 4096, 4097, 65535, 65536, 65537, 99991, 250_000]


def shuffled(n: int, seed: int = 0) -> NDArray[np.int64]:
    return permute(np.arange(n, dtype=np.uint64), n, seed).astype(np.int64)


def epoch_of(plan: BatchPlan, epoch: int = 0, shard: int = 0) -> list[int]:
    return [sample for batch in range(plan.num_batches) for sample in plan.indices(epoch, batch, shard).tolist()]


# --- permute ---------------------------------------------------------------------------------------------------------


def test_permute_is_a_bijection_at_any_size() -> None:
    for n, seed in product(SIZES, (0, 1, 2**63 - 1)):
        assert np.array_equal(np.sort(shuffled(n, seed)), np.arange(n)), (n, seed)


def test_permute_does_not_depend_on_what_else_is_asked_for() -> None:
    whole = shuffled(1000, 5)
    some = np.array([[999, 0], [7, 500]], dtype=np.uint64)
    assert np.array_equal(permute(some, 1000, 5).astype(np.int64), whole[[[999, 0], [7, 500]]])


def test_permute_reaches_far_into_sizes_that_no_list_could_hold() -> None:
    n = 2**40 + 7
    samples = permute(np.arange(100_000, dtype=np.uint64), n, 3)
    assert len(np.unique(samples)) == 100_000
    assert samples.max() < n
    assert samples.max() > n - n // 1000, "it reaches the end"


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


BY_SEED = pytest.mark.parametrize(
    "keys", [lambda number: number, lambda number: key(42, number)], ids=["seeds 0, 1, …", "epochs 0, 1, …"]
)


@BY_SEED
@pytest.mark.parametrize("n", [5, 16, 23])
def test_every_sample_comes_at_every_position(n: int, keys: Callable[[int], int]) -> None:
    table = orders(n, 3000, keys)
    # Rows and columns of the table of counts are fixed: a permutation has each once.
    assert_uniform(table + n * np.arange(n), n * n, (n - 1) ** 2)


@BY_SEED
@pytest.mark.parametrize("n", [7, 16])
def test_every_pair_of_samples_comes_in_one_place(n: int, keys: Callable[[int], int]) -> None:
    table = orders(n, 3000, keys)
    first, second = table[:, 2], table[:, 3]
    cells = first * (n - 1) + second - (second > first)
    assert_uniform(cells, n * (n - 1))


@BY_SEED
def test_neighbours_are_strangers(keys: Callable[[int], int]) -> None:
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

PLANS = [
    pytest.param(n, batch, shards, sharding, id=f"{n} samples, batch {batch}, {shards} shards, {sharding}")
    for n, batch, shards in [(1, 1, 1), (1, 8, 2), (21, 8, 2), (64, 8, 3), (455, 16, 2), (100, 7, 5), (70_001, 512, 4)]
    for sharding in ("contiguous", "strided")
]


@pytest.mark.parametrize(("n", "batch", "shards", "sharding"), PLANS)
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_sample_comes_once(n: int, batch: int, shards: int, sharding: str, shuffle: bool) -> None:
    plan = BatchPlan(n, batch, shards, 42, shuffle, sharding=sharding)
    for epoch in (0, 3):
        dealt = [sample for shard in range(shards) for sample in epoch_of(plan, epoch, shard)]
        assert sorted(dealt) == list(range(n))
    for number in range(plan.num_batches):
        sizes = [plan.size(number, shard) for shard in range(shards)]
        assert sizes == [len(plan.indices(0, number, shard)) for shard in range(shards)]
        assert sum(sizes) == plan.size(number)
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("n", "batch", "shards", "sharding"), PLANS)
def test_a_step_sees_the_same_samples_in_any_number_of_shards(n: int, batch: int, shards: int, sharding: str) -> None:
    whole = BatchPlan(n, batch, seed=42, shuffle=True, sharding=sharding)
    cut = BatchPlan(n, batch, shards, 42, True, sharding=sharding)
    assert cut.num_batches == whole.num_batches
    for epoch, number in product((0, 1), range(whole.num_batches)):
        samples = torch.cat([cut.indices(epoch, number, shard) for shard in range(shards)])
        assert torch.equal(samples.sort().values, whole.indices(epoch, number).sort().values)


def test_drop_last_drops_only_what_does_not_fill_a_global_batch() -> None:
    plan = BatchPlan(455, 16, 2, 42, True, drop_last=True)
    assert plan.num_batches == 28
    assert [plan.size(number, shard) for shard in range(2) for number in range(28)] == [8] * 56
    kept, other = ({sample for shard in range(2) for sample in epoch_of(plan, epoch, shard)} for epoch in (0, 1))
    assert len(kept) == 448
    assert kept != other, "other epochs drop others"


def test_shards_deal_as_they_are_called() -> None:
    plan = BatchPlan(10, 8, 3)
    contiguous = [plan.indices(0, 0, shard).tolist() for shard in range(3)]
    strided = [BatchPlan(10, 8, 3, sharding="strided").indices(0, 0, shard).tolist() for shard in range(3)]
    assert contiguous == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert strided == [[0, 3, 6], [1, 4, 7], [2, 5]]
    assert [plan.indices(0, 1, shard).tolist() for shard in range(3)] == [[8], [9], []]


@pytest.mark.parametrize("sharding", ["contiguous", "strided"])
def test_shard_beyond_the_last_is_empty(sharding: str) -> None:
    """For a rank that computes no shard of a batch."""
    for shards in (1, 3):
        plan = BatchPlan(10, 8, shards, sharding=sharding)
        assert [plan.size(number, shards) for number in range(plan.num_batches)] == [0, 0]
        assert epoch_of(plan, 0, shards) == []
        assert plan.indices_of(0, range(1), shards).shape == (1, 0)


def test_order_differs_by_epoch_and_by_seed_but_not_by_who_asks_when() -> None:
    plan = BatchPlan(100, 10, seed=1, shuffle=True)
    first, second = epoch_of(plan, 0), epoch_of(plan, 1)
    assert first != second
    assert first != epoch_of(BatchPlan(100, 10, seed=2, shuffle=True), 0)
    again = BatchPlan(100, 10, seed=1, shuffle=True)
    assert again.indices(1, 7).tolist() == second[70:80], "the last batch first"
    assert epoch_of(again, 0) == first


def test_a_batch_may_lie_across_blocks() -> None:
    """Positions are permuted in blocks of 65,536."""
    n, batch = 200_000, 50_000
    for sharding, epoch in product(("contiguous", "strided"), (0, 1)):
        plan = BatchPlan(n, batch, 2, 9, True, sharding=sharding)
        expected = shuffled(n, key(9, epoch))[batch : 2 * batch]
        shards = [plan.indices(epoch, 1, shard).numpy() for shard in range(2)]
        if sharding == "contiguous":
            assert np.array_equal(np.concatenate(shards), expected)
        else:
            assert np.array_equal(shards[1], expected[1::2])


def test_limited_cuts_the_end_off() -> None:
    plan = BatchPlan(100, 10, seed=1, shuffle=True)
    assert epoch_of(plan.limited(3)) == epoch_of(plan)[:30]
    assert plan.limited(99).num_batches == 10
    assert plan.limited(0).num_batches == 0


# --- weights ---------------------------------------------------------------------------------------------------------


def test_weighted_samples_come_as_often_as_they_weigh() -> None:
    weights = np.array([0, 1, 2, 0, 5, 0], dtype=np.float64)
    plan = BatchPlan(6, 6, shuffle=True, seed=3, weights=weights)
    drawn = np.concatenate([epoch_of(plan, epoch) for epoch in range(2000)])
    counts = np.bincount(drawn, minlength=6)
    assert counts[weights == 0].sum() == 0
    assert counts / counts.sum() == pytest.approx(weights / 8, abs=0.015)
    assert len({tuple(epoch_of(plan, epoch)) for epoch in range(100)}) > 50
    assert epoch_of(BatchPlan(6, 6, shuffle=True, seed=4, weights=weights), 1) != epoch_of(plan, 1)


@pytest.mark.parametrize("sharding", ["contiguous", "strided"])
def test_weighted_samples_are_the_same_in_any_number_of_shards(sharding: str) -> None:
    weights = np.arange(1, 1001, dtype=np.float64)
    whole = BatchPlan(1000, 24, shuffle=True, weights=weights)
    for batch in (0, 7, whole.num_batches - 1):
        expected = dict(zip(whole.positions(batch).tolist(), whole.indices(5, batch).tolist(), strict=True))
        for shards in (2, 3):
            plan = BatchPlan(1000, 24, shards, shuffle=True, sharding=sharding, weights=weights)
            found: dict[int, int] = {}
            for shard in range(shards):
                places, samples = plan.positions(batch, shard), plan.indices(5, batch, shard)
                found.update(zip(places.tolist(), samples.tolist(), strict=True))
            assert found == expected
