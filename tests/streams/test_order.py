"""The order of a set in shards: each row once, within its window, and how well that shuffles, as numbers."""

import time

import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.typing import NDArray

from ddp_recipes.data.order import BatchPlan, Sequential, Shuffled
from ddp_recipes.streams.index import Shard
from ddp_recipes.streams.order import Windowed, cost, quality
from helpers.patience import patience

orders = st.builds(
    Windowed,
    st.lists(st.integers(1, 40), min_size=1, max_size=9).map(tuple),
    st.integers(0, 2**63 - 1),
    st.integers(1, 100),
    st.integers(1, 12),
)


def everything(order: Windowed, epoch: int) -> NDArray[np.int64]:
    return order.samples(epoch, np.arange(len(order), dtype=np.uint64)).astype(np.int64)


@given(orders, st.integers(0, 5))
def test_each_row_comes_once(order: Windowed, epoch: int) -> None:
    assert sorted(everything(order, epoch)) == list(range(sum(order.rows)))


@given(orders, st.integers(0, 5), st.data())
def test_order_does_not_depend_on_what_else_is_asked_for(order: Windowed, epoch: int, data: st.DataObject) -> None:
    some = np.array(data.draw(st.lists(st.integers(0, len(order) - 1), min_size=1)), dtype=np.uint64)
    assert np.array_equal(order.samples(epoch, some), everything(order, epoch)[some.astype(np.int64)])


@pytest.mark.slow
@given(orders, st.integers(0, 5))
def test_rows_stay_within_their_window_of_their_lane(order: Windowed, epoch: int) -> None:
    """So a reader needs no more of the set at a time than a window, wherever it begins."""
    lanes, size = order.lanes, order.rows_of_a_window
    places = order.places(epoch, np.arange(len(order), dtype=np.uint64)).astype(np.int64)
    assert size * lanes <= max(order.window, lanes)
    first = 0
    for lane in range(lanes):
        of_lane = places[lane::lanes]
        for start in range(0, len(of_lane), size):
            window = of_lane[start : start + size]
            assert sorted(window) == list(range(first + start, first + start + len(window)))
        first += len(of_lane)
    # And those places are whole shards, in the order of the epoch.
    in_places = everything(order, epoch)[np.argsort(places)]
    starts = np.cumsum(order.rows) - order.rows
    whole = [range(starts[shard], starts[shard] + order.rows[shard]) for shard in order.shards(epoch)]
    assert in_places.tolist() == [row for shard in whole for row in shard]


def test_windows_of_a_row_are_as_quick_as_those_of_many() -> None:
    began, places = time.monotonic(), np.arange(1 << 16, dtype=np.uint64)
    assert len({*Windowed((10_000,) * 100, 3, 1, 8).samples(0, places).tolist()}) == 1 << 16
    assert time.monotonic() - began < patience(5), "18 s window by window"


@given(st.one_of(orders, st.builds(Shuffled, st.integers(1, 40), st.integers(0, 2**63 - 1))), st.data())
def test_places_of_several_epochs_are_those_of_each(order: Windowed | Shuffled, data: st.DataObject) -> None:
    places = np.array(data.draw(st.lists(st.integers(0, len(order) - 1))), dtype=np.uint64)
    epochs = np.array(data.draw(st.lists(st.integers(0, 5), min_size=len(places), max_size=len(places))), np.uint64)
    alone = [int(order.samples(int(epoch), places[at : at + 1])[0]) for at, epoch in enumerate(epochs)]
    assert order.samples(epochs, places).tolist() == alone


def test_order_differs_by_epoch_and_seed() -> None:
    rows = (20,) * 9
    found = {tuple(everything(Windowed(rows, seed, 50, 2), epoch)) for seed in (1, 2) for epoch in (0, 1)}
    assert len(found) == 4


def test_order_reaches_far_into_sizes_that_no_list_could_hold() -> None:
    order = Windowed((100_000,) * 10_000, 7, 16384, 8)
    samples = order.samples(3, np.arange(10**9 - 3000, 10**9, dtype=np.uint64))
    assert len(np.unique(samples)) == 3000
    assert samples.max() < 10**9


# --- quality and cost ------------------------------------------------------------------------------------------------


def test_a_full_shuffle_and_none_have_the_numbers_that_they_should() -> None:
    full = quality(Shuffled(100_000, 1), 256)
    assert full.displacement == pytest.approx(1, abs=0.01)
    assert full.correlation == pytest.approx(0, abs=0.01)
    assert full.batch_variance == pytest.approx(1, abs=0.1)
    none = quality(Sequential(100_000), 256)
    assert none.displacement == 0
    assert none.correlation == pytest.approx(1, abs=0.01)
    assert none.batch_variance == pytest.approx(256, rel=0.05), "a batch tells as much as one row"


@pytest.mark.parametrize(("rows", "batch"), [((1,), 8), ((2,), 1), ((3, 4), 8), ((9,), 9)])
def test_sets_smaller_than_a_batch_have_numbers_too(rows: tuple[int, ...], batch: int) -> None:
    assert np.isfinite(quality(Windowed(rows, 1, 4), batch)).all()


@pytest.mark.slow
def test_wider_windows_and_more_lanes_shuffle_better() -> None:
    def of(window: int, interleave: int) -> float:
        return quality(Windowed((1000,) * 100, 7, window, interleave), 256).batch_variance

    assert of(1000, 1) > 5 * of(10_000, 1) > 25 * of(100_000, 1)
    assert of(10_000, 1) > 1.5 * of(10_000, 8)
    assert of(100_000, 1) == pytest.approx(1, abs=0.15), "a window as wide as the set is a full shuffle"


@pytest.mark.slow
def test_what_is_read_again_is_counted() -> None:
    """Row groups are read once if windows fit in memory and ranks have lanes of their own, else more often."""
    shards = [Shard(f"{number}", 1000, 0, groups=10, memory=10_000) for number in range(48)]
    order = Windowed((1000,) * 48, 7, 4800, 6)

    def read(ranks: int, limit: int, sharding: str = "strided") -> float:
        return cost(order, shards, BatchPlan(order, 96, ranks, sharding=sharding), limit).times_read

    assert read(1, 1 << 30) == read(2, 1 << 30) == read(3, 1 << 30) == 1
    assert read(2, 1 << 30, "contiguous") == 2, "each rank reads rows of each lane"
    assert read(4, 1 << 30) == 2, "4 ranks and 6 lanes"
    assert read(1, 30_000) > 3
    found = cost(order, shards, BatchPlan(order, 96), 1 << 30)
    assert (found.memory, found.files) == (6 * 9 * 1000, 12)
