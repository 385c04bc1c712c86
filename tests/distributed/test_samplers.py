"""Samplers and batch samplers of a user's own: the same global batches on any ranks, or a refusal that says why."""

from collections.abc import Callable
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ddp_recipes.errors import RequestError, RunFailed
from ddp_recipes.reporting.run_directory import Summary
from helpers.marks import slow_but
from helpers.ranks import run_recipe

Run = Callable[..., Summary]
Over = Callable[..., tuple[Summary, Path]]
SIZE = 13
KEYS = ("~data.train", "~data.val", "+data.val=null", "data.global_batch_size=4", "trainer.max_epochs=2")
EPOCHS = 2


@pytest.fixture
def over(tmp_path: Path, run: Run) -> Over:
    """Train with a sampler; return the summary, and the folder in which ranks have written what they were given."""
    count = 0

    def train(*overrides: str, dataset: str = "iterable_parts.Indexed", **options: Any) -> Any:
        nonlocal count
        count += 1
        folder = tmp_path / f"seen_{count}"
        folder.mkdir()
        own = ("task._target_=iterable_parts.Seen", f"+task.folder={folder}")
        summary = run(*KEYS, *own, f"+data.train={{_target_: {dataset}}}", *overrides, **options)
        return summary, folder

    return train


def seen_in(folder: Path) -> list[list[int]]:
    """Return the samples of each training step, those of rank 0 first."""
    lines = [[line.split() for line in path.read_text().splitlines()] for path in sorted(folder.glob("seen_*"))]
    steps = [[[int(each) for each in line[2:]] for line in of_rank if line[0] == "train"] for of_rank in lines]
    return [[each for rank in ranks for each in rank] for ranks in zip(*steps, strict=True)]


def cut(order: list[int], size: int = 4) -> list[list[int]]:
    return [order[start : start + size] for start in range(0, len(order), size)]


def batches_of(name: str) -> list[list[int]]:
    """Return the batches of a sampler, as a plain loop over a ``DataLoader`` would have them."""
    found, sampler = [], getattr(import_module("sampler_parts"), name)(range(SIZE))
    for epoch in range(EPOCHS):
        if sampler.set_epoch is not None:
            sampler.set_epoch(epoch)
        given = list(sampler)
        found += given if isinstance(given[0], list) else cut(given)
    return found


@pytest.mark.parametrize(("world_size", "workers"), slow_but([(2, 0)], [(1, 0), (1, 2), (2, 0), (2, 2)]))
@pytest.mark.parametrize("name", ["Told", "Counting"])
def test_global_batches_are_cut_of_what_the_sampler_gives(name: str, world_size: int, workers: int, over: Over) -> None:
    node = f"data.sampler={{_target_: sampler_parts.{name}}}"
    summary, folder = over(node, f"data.num_workers={workers}", world_size=world_size)
    assert seen_in(folder) == batches_of(name)
    assert (summary["samples_seen"], summary["global_step"], summary["epoch"]) == (22, 6, 2)


@pytest.mark.parametrize(("world_size", "workers"), slow_but([(1, 0), (2, 0)], [(1, 0), (1, 2), (2, 0), (2, 2)]))
def test_a_batch_sampler_gives_global_batches_of_any_size(world_size: int, workers: int, over: Over) -> None:
    node = "data.batch_sampler={_target_: sampler_parts.Uneven}"
    summary, folder = over(node, f"data.num_workers={workers}", world_size=world_size)
    expected = batches_of("Uneven")
    # A rank without a sample is given one that does not count.
    assert [batch[: len(given)] for batch, given in zip(seen_in(folder), expected, strict=True)] == expected
    assert (summary["samples_seen"], summary["global_step"], summary["epoch"]) == (26, 8, 2)


BITS = [
    ["data.batch_sampler={_target_: sampler_parts.Uneven}"],
    ["data.sampler={_target_: sampler_parts.Drawing}", "data.num_workers=1"],
    ["data.sampler={_target_: sampler_parts.Counting}"],
    ["data.sampler={_target_: sampler_parts.Told}", "data.group_by_length=true"],
    ["data.group_by_length=true"],
]


@pytest.mark.parametrize("keys", slow_but(BITS[:1], BITS))
def test_bits_are_those_of_one_rank_also_where_another_number_goes_on(keys: list[str], over: Over) -> None:
    common = (
        *keys,
        "strategy=ddp_exact",
        "strategy.shards=4",
        "checkpoint.every_n_steps=1",
        "checkpoint.save_top_k=-1",
    )
    whole, _ = over(*common, dataset="sampler_parts.Lengthy")
    two, _ = over(*common, dataset="sampler_parts.Lengthy", world_size=2)
    assert two["weights_sha256"] == whole["weights_sha256"]
    # Within the second epoch, so that what a sampler counts itself has to be counted again.
    stop = whole["global_step"] - 2
    resumed = f"ckpt_path={whole['run_directory']}/checkpoints/step_{stop:08d}.pt"
    four, _ = over(*common, resumed, dataset="sampler_parts.Lengthy", world_size=4)
    assert four["weights_sha256"] == whole["weights_sha256"]


@pytest.mark.parametrize("world_size", slow_but([1], [1, 2]))
def test_a_sample_that_comes_twice_draws_anew(world_size: int, over: Over) -> None:
    node = "data.batch_sampler={_target_: sampler_parts.Pairs}"
    seen = seen_in(over(node, "optimizer.lr=1e-20", dataset="sampler_parts.Views", world_size=world_size)[1])
    assert len({each for views in seen for each in views}) == 2 * SIZE * EPOCHS


@pytest.mark.slow
def test_what_a_sampler_draws_follows_from_seed_and_epoch(over: Over) -> None:
    node = "data.sampler={_target_: sampler_parts.Drawing}"
    one, two = (seen_in(over(node, world_size=size)[1]) for size in (1, 2))
    assert one == two
    assert one[:3] != one[3:]
    assert len({each for batch in one[:3] for each in batch}) == 10, "it gives one sample twice"
    assert seen_in(over(node, "seed=7")[1]) != one


@pytest.mark.parametrize("given", slow_but(["true"], ["true", "lengths", "sampler_parts.lengths_of"]))
def test_samples_of_like_length_are_in_a_batch(given: str, over: Over) -> None:
    steps = seen_in(over(f"data.group_by_length={given}", dataset="sampler_parts.Lengthy")[1])
    lengths = import_module("sampler_parts").Lengthy().lengths
    for epoch in (steps[:4], steps[4:]):
        assert sorted(each for batch in epoch for each in batch) == list(range(SIZE))
        spans = sorted((min(lengths[each] for each in batch), max(lengths[each] for each in batch)) for batch in epoch)
        assert all(last < first for (_, last), (first, _) in pairwise(spans))


@pytest.fixture
def brought(tmp_path: Path) -> Callable[[str], list[list[int]]]:
    """Train a module that brings a loader of a kind; return the samples of each step."""

    def train(kind: str) -> list[list[int]]:
        own = ["task=lightning", "data=lightning", "model=toy", "model._target_=sampler_parts.Brings"]
        own += [f"+model.kind={kind}", f"+model.folder={tmp_path}", "data.in_features=10", "data.out_features=5"]
        run_recipe([*own, "trainer.max_epochs=2", "logger=none", "launcher.device=cpu"], 1, tmp_path / "run")
        return seen_in(tmp_path)

    return train


@pytest.mark.parametrize("kind", ["sampler", "batch_sampler", "of_torch"])
def test_those_of_a_module_s_own_loaders_are_used(kind: str, brought: Callable[[str], list[list[int]]]) -> None:
    steps = brought(kind)
    told = batches_of("Told")
    if kind == "sampler":
        assert steps == [batch for batch in told if len(batch) == 4], "its loader drops the last one"
    elif kind == "batch_sampler":
        assert steps == batches_of("Uneven")
    else:
        epochs = [[each for batch in half for each in batch] for half in (told[:3], told[3:])]
        assert steps == [batch for epoch in epochs for batch in cut(epoch, 3) if len(batch) == 3]


def test_a_sampler_of_torch_that_deals_to_ranks_says_whether_to_shuffle(
    brought: Callable[[str], list[list[int]]],
) -> None:
    assert brought("in_turn") == 2 * cut(list(range(SIZE)), 4)


def test_data_workers_of_a_module_s_own_loader_begin_with_its_function(
    brought: Callable[[str], list[list[int]]],
) -> None:
    assert brought("opened") == 2 * cut(list(range(SIZE)), 4)


def test_a_batch_sampler_over_one_that_deals_to_ranks_is_refused(brought: Callable[[str], list[list[int]]]) -> None:
    with pytest.raises(RequestError, match=r"has a DistributedSampler in a batch sampler, and"):
        brought("dealt")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            ["data.sampler={_target_: sampler_parts.Restless}"],
            r"The sampler, a Restless, gives another order each time",
        ),
        (["data.sampler={_target_: sampler_parts.Endless}"], r"a Endless, gives more than 11 in an epoch"),
        (["data.sampler={_target_: sampler_parts.Odd, gives: []}"], "a Odd, gives no sample"),
        (["data.sampler={_target_: sampler_parts.Odd, gives: [a, b]}"], r"gives \['a', 'b'\]. Allowed: numbers of sam"),
        (["data.sampler={_target_: sampler_parts.Odd, gives: [3, 13]}"], "gives samples from 3 to 13, .* has 13"),
        (["data.sampler={_target_: sampler_parts.Uneven}"], r"gives lists: it is a batch sampler. Set data.batch_sam"),
        (["data.batch_sampler={_target_: sampler_parts.Told}"], r"gives \d+. Allowed: lists of numbers, each a global"),
        (["data.batch_sampler={_target_: sampler_parts.Odd, gives: [[1], []]}"], "gives a batch without a sample"),
        (["data.sampler={_target_: iterable_parts.Indexed}"], "makes a Indexed, which has no __iter__"),
        (["data.sampler={_target_: sampler_parts.Told}", "data.weights=lengths"], "data.weights and data.sampler each"),
        (["data.batch_sampler={_target_: sampler_parts.Uneven}", "data.drop_last=true"], "leave out data.drop_last"),
        (["data.group_by_length=true", "data.shuffle=false"], "data.shuffle=false takes them in their order"),
        (["data.group_by_length=size"], r"data.group_by_length=size gives lengths of the shape \[\]. Needed: one for"),
        (["data.batch_sampler={_target_: sampler_parts.Uneven}", "plan=true"], "plan=true .* leave out the batch samp"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(keys: list[str], message: str, over: Over) -> None:
    with pytest.raises(RequestError, match=message):
        over(*keys, dataset="sampler_parts.Lengthy")


def test_an_epoch_of_another_length_ends_the_run_by_name(over: Over) -> None:
    with pytest.raises(RunFailed, match=r"a Shrinking, gives 10 in epoch 1, and gave 11 in the first one"):
        over("data.sampler={_target_: sampler_parts.Shrinking}", world_size=2)
