"""Mixtures, packed windows and buckets of like length: each by an order that is computed."""

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils.data import ChainDataset

from ddp_recipes.data.order import Sequential, Shuffled
from ddp_recipes.errors import RequestError
from ddp_recipes.streams import LengthBuckets, Mixed, Mixture, Packed, Windowed
from helpers.patience import patience
from helpers.ranks import run_recipe


class Documents(torch.utils.data.Dataset[Any]):
    """Documents of these lengths; no two tokens of them are alike."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths, self._starts = lengths, np.cumsum([0, *lengths])

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.arange(self._starts[index], self._starts[index + 1])


# --- mixtures --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 9)), min_size=1, max_size=4),
    st.integers(1, 90),
    st.booleans(),
    st.integers(0, 2**40),
)
def test_each_set_is_gone_through_in_its_own_epochs(
    sets: list[tuple[int, int]], num_samples: int, shuffle: bool, seed: int
) -> None:
    orders = [Shuffled(size, seed + 1) if shuffle else Sequential(size) for size, _ in sets]
    mixed = Mixed(tuple(orders), tuple(share for _, share in sets), num_samples, seed)
    positions = np.arange(num_samples, dtype=np.uint64)
    places = [mixed.places(epoch, positions) for epoch in range(7)]
    sources, turns = (np.concatenate([each[part] for each in places]).astype(int) for part in (0, 1))
    taken = np.concatenate([mixed.samples(epoch, positions) for epoch in range(7)]).astype(int)
    first = 0
    for number, (size, share) in enumerate(sets):
        own, here = turns[sources == number], taken[sources == number] - first
        for epoch in {*(own // size).tolist()}:
            of_epoch = here[own // size == epoch].tolist()
            assert {*of_epoch} <= {*range(size)}
            assert len({*of_epoch}) == len(of_epoch), "a sample comes twice in an epoch of its set"
        assert {*range(len(taken) // sum(mixed.shares) * share)} <= {*own.tolist()}, "one is left out"
        first += size


@pytest.mark.slow
@settings(deadline=None, derandomize=True)
@given(
    st.lists(st.integers(1, 9), min_size=2, max_size=4), st.lists(st.integers(0, 499), max_size=30), st.integers(0, 9)
)
def test_a_place_has_one_sample_whoever_asks(shares: list[int], places: list[int], epoch: int) -> None:
    mixed = Mixed(tuple(Shuffled(11 + share, 5) for share in shares), tuple(shares), 500, 3)
    every = mixed.samples(epoch, np.arange(500, dtype=np.uint64))
    assert mixed.samples(epoch, np.array(places, dtype=np.uint64)).tolist() == [every[place] for place in places]


def test_each_block_has_as_many_of_a_set_as_its_weight_says() -> None:
    mixture = Mixture({"a": range(100), "b": range(1000), "c": range(7)}, {"a": 0.7, "b": 0.29, "c": 0.01}, block=100)
    order = mixture.sample_order(0, shuffle=True)
    for block in range(0, 1100, 100):
        samples = order.samples(0, np.arange(block, block + 100, dtype=np.uint64)).tolist()
        found = Counter("a" if each < 100 else "b" if each < 1100 else "c" for each in samples)
        assert found == {"a": 70, "b": 29, "c": 1}
    assert [mixture[sample] for sample in (99, 100, 1099, 1100)] == [99, 0, 999, 0]


def test_small_sets_without_weights_come_once_in_an_epoch() -> None:
    """A block of more places than an epoch has some of their samples twice in one, and others not."""
    order = Mixture({"a": range(100), "b": range(53)}).sample_order(0, shuffle=True)
    for epoch in range(3):
        assert sorted(order.samples(epoch, np.arange(153, dtype=np.uint64)).tolist()) == [*range(153)]


@pytest.mark.parametrize("few", [Shuffled(2, 5), Windowed((1, 1), 5, 16384, 8)], ids=["shuffled", "stream"])
def test_a_tiny_set_takes_no_longer_than_a_large_one(few: Shuffled | Windowed) -> None:
    mixed, began = Mixed((Shuffled(60_000, 4), few), (1, 1), 1 << 16, 3), time.monotonic()
    samples = mixed.samples(0, np.arange(1 << 16, dtype=np.uint64))
    assert Counter(samples[samples >= 60_000].tolist()) == {60_000: 1 << 14, 60_001: 1 << 14}
    assert time.monotonic() - began < patience(2), "7 s epoch by epoch of the tiny one"


def test_a_set_of_a_small_weight_comes_no_more_often_than_that() -> None:
    order = Mixture({"many": range(60_000), "few": range(20)}).sample_order(0, shuffle=True)
    samples = order.samples(0, np.arange(len(order), dtype=np.uint64))
    assert np.count_nonzero(samples >= 60_000) == 20, "as each has as many places as samples"
    tiny = Mixture({"a": range(3), "b": range(3)}, {"a": 1.0, "b": 1e-300}).sample_order(0, shuffle=True)
    assert tiny.samples(0, np.arange(6, dtype=np.uint64)).max() < 3


@pytest.mark.parametrize(
    "weights",
    [
        {"a": 1.0},
        {"a": 1.0, "b": 0.0},
        {"a": 1.0, "b": float("nan")},
        {"a": 1.0, "b": "1"},
        {"a": 1.0, "b": 1.0, "c": 1.0},
    ],
)
def test_weights_that_do_not_fit_are_refused(weights: dict[str, float]) -> None:
    with pytest.raises(RequestError, match="Give each set a weight above 0, and only these"):
        Mixture({"a": range(3), "b": range(3)}, weights)
    for sources in ([range(3)], {"a": range(3)}):
        with pytest.raises(
            RequestError, match=r"data.source(s|_weights)=\[.*Allowed: names of sets, each with its own"
        ):
            Mixture(sources, [*weights.values()])  # type: ignore[arg-type]
    for name, value in (("num_samples", -5), ("num_samples", 0), ("num_samples", 2.5), ("block", 0)):
        with pytest.raises(RequestError, match=rf"data\.{name}={value} is not allowed. Allowed: a whole number"):
            Mixture({"a": range(3)}, **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [lambda each: Mixture({"a": each}), lambda each: Packed(each, 4)])
def test_sets_without_an_index_are_refused_by_name(make: Callable[[Any], Any]) -> None:
    with pytest.raises(RequestError, match=r"ChainDataset can only be read in its own order, and samples"):
        make(ChainDataset([]))
    with pytest.raises(RequestError, match="dict is no data set, but holds 1 by name: train"):
        make({"train": range(3)})


# --- packed windows --------------------------------------------------------------------------------------------------


@settings(deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=40).filter(any),
    st.integers(1, 16),
    st.integers(1, 12),
    st.booleans(),
)
def test_no_token_is_lost_and_none_is_foretold_from_another_document(
    lengths: list[int], length: int, group: int, shuffle: bool
) -> None:
    packed = Packed(Documents(lengths), length, group=group)
    packed.sample_order(3, shuffle)
    ends = np.cumsum(lengths) - 1
    for epoch in (0, 1):
        packed.set_epoch(epoch)
        pairs = [(int(t), int(f)) for i in range(len(packed)) for t, f in zip(*packed[i], strict=True)]
        filled = len(packed) * length - sum(lengths)  # with 0, which is the first token, too
        assert Counter(token for token, _ in pairs) == Counter([*range(sum(lengths)), *[0] * filled])
        for token, following in pairs:
            if token:
                assert following == (-100 if token in ends else token + 1)
        assert sum(token == 0 and following != -100 for token, following in pairs) == (0 not in ends)
    assert len(packed) <= sum(lengths) // length + -(-len(lengths) // group)


def test_documents_of_a_group_follow_each_other_otherwise_in_each_epoch() -> None:
    packed = Packed(Documents([5] * 64), 7, group=64)
    packed.sample_order(0, shuffle=True)
    seen = []
    for epoch in (0, 1, 0):
        packed.set_epoch(epoch)
        seen.append(torch.cat([packed[index][0] for index in range(len(packed))]))
    assert not torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2])


def test_a_sample_for_models_that_shift_labels_themselves() -> None:
    sample = Packed(Documents([3, 4]), 8, named=True)[0]
    assert sample["input_ids"].tolist() == [0, 1, 2, 3, 4, 5, 6, 0]
    assert sample["labels"].tolist() == [-100, 1, 2, -100, 4, 5, 6, -100]
    assert sample["position_ids"].tolist() == [0, 1, 2, 0, 1, 2, 3, 0]


# --- buckets ---------------------------------------------------------------------------------------------------------


@settings(deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=90), st.integers(1, 8), st.integers(1, 5))
def test_batches_of_like_length_have_each_sample_once(lengths: list[int], batch: int, window: int) -> None:
    order = LengthBuckets(Documents(lengths), batch, window=window).sample_order(1, shuffle=True)
    places = np.arange(len(lengths), dtype=np.uint64)
    for epoch in (0, 1):
        assert sorted(order.samples(epoch, places).tolist()) == [*range(len(lengths))]
    assert order.samples(1, places[::3]).tolist() == order.samples(1, places)[::3].tolist()


def test_little_is_padded() -> None:
    lengths = np.random.default_rng(0).integers(1, 500, 4096)
    places = np.arange(4096, dtype=np.uint64)

    def padded(samples: Any) -> int:
        batches = lengths[samples.astype(int)].reshape(-1, 16)
        return int((batches.max(axis=1, keepdims=True) - batches).sum())

    buckets = LengthBuckets(Documents(lengths.tolist()), 16).sample_order(0, shuffle=True)
    assert padded(buckets.samples(0, places)) < padded(Shuffled(4096, 0).samples(0, places)) / 20


# --- runs ------------------------------------------------------------------------------------------------------------

SET = "_target_: ddp_recipes.datasets.random_regression, in_features: 10, out_features: 5, split: train"
MIXTURE = [
    *("data=mixture", "task=regression", "data.in_features=10", "data.out_features=5", "data.global_batch_size=12"),
    f"data.sources={{a: {{{SET}, num_samples: 30, seed: 1}}, b: {{{SET}, num_samples: 50, seed: 2}}}}",
    *(
        "data.source_weights={a: 3, b: 1}",
        "data.block=16",
        "strategy=ddp_exact",
        "strategy.shards=4",
        "trainer.max_epochs=2",
    ),
]


@pytest.mark.slow
def test_a_mixture_trains_the_same_bits_on_one_rank_and_on_two_and_resumed(tmp_path: Path) -> None:
    def run(name: str, ranks: int, *overrides: str) -> dict[str, Any]:
        given = [*MIXTURE, "model=linear", "logger=none", "trainer.progress=false", "launcher.device=cpu", *overrides]
        return {**run_recipe(given, ranks, tmp_path / name)}

    whole = run("whole", 1)
    assert whole["samples_seen"] == 160
    run("cut", 1, "trainer.max_steps=5")
    resumed = run("cut", 2, "ckpt_path=auto")
    assert resumed["weights_sha256"] == whole["weights_sha256"]
