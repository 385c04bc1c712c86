"""Iterable-style data sets: every sample once, all ranks at one step, and on from where a run stopped."""

import csv
import json
import subprocess
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from ddp_recipes.data.iterable import Dealt, IterableLoader, nominal
from ddp_recipes.errors import RequestError, RunFailed
from ddp_recipes.reporting.run_directory import Summary
from ddp_recipes.testing import run_recipe
from helpers.marks import at_night, needs, slow_but
from helpers.patience import patience

Run = Callable[..., Summary]
STRATEGIES = {"ddp": [], "fsdp": ["strategy=fsdp", "strategy.wrap=[net1,net2]"]}
BY_METHOD = ["data.shard_arguments={_method_: shard, num_shards: world, index: rank}"]
Seen = dict[str, list[list[int]]]  # by rank the samples of each training step


@pytest.fixture
def over(tmp_path: Path, run: Run) -> Callable[..., tuple[Summary, Seen]]:
    """Train on a stream; return the summary, and what each rank was given in each step."""
    count = 0

    def train(*overrides: str, train: str = "Numbers", val: str = "Numbers, size: 5", **options: Any) -> Any:
        nonlocal count
        count += 1
        folder = tmp_path / f"seen_{count}"
        folder.mkdir()
        summary = run(
            *("~data.train", "~data.val", "data.batch_size=2", "data.val_batch_size=2", "trainer.max_epochs=2"),
            *("task._target_=iterable_parts.Seen", f"+task.folder={folder}", "trainer.num_sanity_val_steps=0"),
            f"+data.train={{_target_: iterable_parts.{train}}}",
            *([f"+data.val={{_target_: iterable_parts.{val}}}"] if val else ["+data.val=null"]),
            *overrides,
            **options,
        )
        return summary, {path.name: steps_of(path, "train") for path in sorted(folder.iterdir())}

    return train


def steps_of(path: Path, split: str) -> list[list[int]]:
    lines = [line.split() for line in path.read_text().splitlines()]
    return [[int(value) for value in line[2:]] for line in lines if line[0] == split]


def global_batches(seen: Seen) -> list[list[int]]:
    """Return the samples of each step over all ranks; a rank with none was given one that does not count."""
    return [[each for rank in ranks for each in rank] for ranks in zip(*seen.values(), strict=True)]


@pytest.mark.parametrize(
    ("world_size", "workers"), slow_but([(2, 0)], [(size, workers) for size in (1, 2, 3) for workers in (0, 2)])
)
def test_each_rank_keeps_its_share_of_the_same_global_batches(world_size: int, workers: int, over: Any) -> None:
    summary, seen = over(f"data.num_workers={workers}", "data.global_batch_size=6", world_size=world_size)
    batches = global_batches(seen)
    assert [batch[: 1 if at == 2 else 6] for at, batch in enumerate(batches[:3])] == [
        [0, 1, 2, 3, 4, 5],
        [6, 7, 8, 9, 10, 11],
        [12],
    ]
    assert batches[3:] == batches[:3]
    assert (summary["samples_seen"], summary["global_step"], summary["epoch"]) == (26, 6, 2)
    alone, _ = over("data.global_batch_size=6", "strategy=single")
    assert summary["metrics"] == pytest.approx(alone["metrics"], rel=1e-4)
    if world_size == 1:
        assert summary["weights_sha256"] == alone["weights_sha256"]


def test_batches_whose_sizes_ranks_exchange_are_read_one_a_step() -> None:
    """Read all at once, the step that needs the first of them waited for all."""
    read: list[int] = []

    class Counted(IterableDataset[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            for number in range(48):
                read.append(number)
                yield torch.tensor([number])

    dealt = Dealt(0, [0, 1], lambda mine: torch.stack([mine, mine]))
    loader = IterableLoader(Counted(), nominal(2, 2, 0, False, "strided"), torch.device("cpu"), dealt=dealt)
    counts = [len(read) for _ in loader.batches(0)]
    assert len(counts) == 24
    assert {after - before for before, after in pairwise(counts[8:19])} == {2}
    assert [len(read) - start for start in [len(read)] for _ in loader.limited(6).batches(0)][-1] == 12, "no more"


def test_a_set_that_is_its_own_iterator_is_read_as_others_are(over: Any) -> None:
    common = ("data.global_batch_size=6", "checkpoint.every_n_steps=2", "trainer.max_epochs=1")
    _, seen = over(*common, train="Itself", world_size=2)
    whole, expected = over(*common, world_size=2)
    assert seen == expected
    resumed = f"ckpt_path={whole['run_directory']}/checkpoints/step_00000002.pt"
    gone_on, _ = over(*common, resumed, train="Itself", world_size=2)
    assert gone_on["weights_sha256"] == whole["weights_sha256"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_epoch_is_logged_alike_however_far_ranks_have_read_ahead(world_size: int, over: Any) -> None:
    often = ("data.global_batch_size=6", "trainer.log_every_n_steps=1", "logger=csv")
    summary, _ = over(*often, world_size=world_size)
    with (Path(summary["run_directory"]) / "csv/metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["train/epoch"]]
    assert [float(row["train/epoch"]) for row in rows] == [0, 0, 1, 1, 1, 2]


OWN_SHARE = """
import os
from torch import arange
from torch.utils.data import IterableDataset

class OwnShare(IterableDataset):
    def __init__(self):  # as LitData's: before there is a process group the environment says which rank it is for
        self.rank, self.ranks = int(os.environ.get("GLOBAL_RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

    def __iter__(self):
        for number in range(self.rank, 12, self.ranks):
            yield arange(10.0) * number, arange(5.0) * number
"""


@pytest.mark.slow
@pytest.mark.spawn
def test_a_set_that_finds_by_itself_which_rank_it_is_for(python: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN_SHARE)
    keys = ["~data.train", "+data.train._target_=own.OwnShare", "data.val=null", "data.global_batch_size=4"]
    keys += ["model=toy", "data=random", "task=regression", "launcher.nproc_per_node=2", "launcher.device=cpu"]
    keys += ["trainer.max_epochs=1"]

    def ran(*overrides: str) -> subprocess.CompletedProcess[str]:
        command = [python, "-m", "ddp_recipes", *keys, *overrides]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=patience(120), check=False)

    failed = ran("hydra.run.dir=run")
    assert failed.returncode == 1
    assert "other samples on rank 1 than on rank 0 (batch 0)" in failed.stderr
    assert "set data.shard_arguments=own" in failed.stderr
    done = ran("hydra.run.dir=own", "data.shard_arguments=own")
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "own" / "summary.json").read_text())
    assert (summary["samples_seen"], summary["global_step"]) == (12, 3)


@pytest.mark.slow
def test_shares_are_those_of_a_set_with_an_index(over: Any, run: Run) -> None:
    streamed, _ = over("data.shard=strided", "data.drop_last=true", train="Numbers, size: 15", world_size=2)
    indexed = run(
        *("~data.train", "~data.val", "data.batch_size=2", "data.val_batch_size=2", "trainer.max_epochs=2"),
        *("data.shard=strided", "data.drop_last=true", "data.shuffle=false"),
        "+data.train={_target_: iterable_parts.Indexed, size: 15}",
        "+data.val={_target_: iterable_parts.Indexed, size: 5}",
        world_size=2,
    )
    assert streamed["weights_sha256"] == indexed["weights_sha256"]
    assert streamed["metrics"]["val/loss"] == indexed["metrics"]["val/loss"]
    assert streamed["samples_seen"] == 24


@pytest.mark.parametrize(("world_size", "workers"), slow_but([(2, 0)], [(2, 0), (2, 2), (3, 0), (3, 2)]))
def test_a_set_that_is_told_its_shard_gives_every_sample_once(world_size: int, workers: int, over: Any) -> None:
    keys = ("data.shard_arguments={num_shards: world, index: rank}", f"data.num_workers={workers}")
    summary, seen = over(*keys, "trainer.max_epochs=1", train="Sharded", val="Sharded", world_size=world_size)
    assert summary["samples_seen"] == 13
    assert {each for rank in seen.values() for batch in rank for each in batch} == set(range(13))
    assert len({len(steps) for steps in seen.values()}) == 1, "all ranks end at one step"
    method = ("data.shard_arguments={_method_: shard, num_shards: world, index: rank}", f"data.num_workers={workers}")
    again, same = over(*method, "trainer.max_epochs=1", train="Sharded", val="Sharded", world_size=world_size)
    assert (again["weights_sha256"], same) == (summary["weights_sha256"], seen)


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "workers"), slow_but([(2, 0)], [(1, 0), (1, 2), (2, 0)]))
def test_samples_that_a_set_leaves_out_are_counted(world_size: int, workers: int, over: Any, tmp_path: Path) -> None:
    keys, options = [f"data.num_workers={workers}"], {"train": "Holes", "world_size": world_size}
    summary, _ = over(*keys, **options)
    assert summary["skipped_samples"] == 4, "0, 4, 8 and 12"
    first, _ = over(*keys, "trainer.max_steps=1", directory=tmp_path / "run", **options)
    assert first["skipped_samples"] == (1 if world_size == 1 else 2), "those before the samples that were used"
    summary, _ = over(*keys, "ckpt_path=auto", directory=tmp_path / "run", **options)
    assert summary["skipped_samples"] == 4


def test_set_epoch_is_called(over: Any) -> None:
    _, seen = over(train="Sharded")
    (steps,) = seen.values()
    first, second = ([each for step in half for each in step] for half in (steps[:7], steps[7:]))
    assert sorted(first) == sorted(second) == list(range(13))
    assert first != second


@pytest.mark.slow
def test_it_is_told_the_epoch_once_however_many_read_it(over: Any, tmp_path: Path) -> None:
    """Hugging Face's sets share the number with their data workers, and change it in two steps."""
    over("data.num_workers=2", train=f"Told, told: '{tmp_path}/told'")
    assert (tmp_path / "told").read_text() == "0 1 "


@pytest.mark.slow
def test_a_set_that_deals_itself_to_ranks_is_taken_at_its_word(over: Any) -> None:
    summary, seen = over("data.shard_arguments=own", "trainer.max_epochs=1", train="ByRank", val="ByRank", world_size=2)
    assert summary["samples_seen"] == 13
    assert [steps[:3] for steps in seen.values()] == [[[0, 2], [4, 6], [8, 10]], [[1, 3], [5, 7], [9, 11]]]
    with pytest.raises(RunFailed, match=r"ByRank, gives other samples on rank 1 than on rank 0 .*shard_arguments=own"):
        over(train="ByRank", world_size=2)
    with pytest.raises(RunFailed, match=r"Numbers, gives all ranks the same samples, .* would count 2 times"):
        over("data.shard_arguments=own", train="Numbers", world_size=2)


@pytest.mark.slow
def test_streams_that_differ_by_chance_are_refused(over: Any) -> None:
    with pytest.raises(RunFailed, match=r"Drawn, gives other samples on rank 1 .*if it draws at random, seed what"):
        over(train="Drawn", world_size=2)
    with pytest.raises(RunFailed, match=r"Drawn, gives other samples on rank 1 than on rank 0"):
        over("strategy=ddp_pipeline", "data.batch_size=4", train="Drawn", world_size=2)


@pytest.mark.slow
@pytest.mark.parametrize("workers", slow_but([2], [1, 2]))
def test_data_workers_that_deal_a_stream_lose_and_repeat_nothing(workers: int, over: Any) -> None:
    summary, seen = over(f"data.num_workers={workers}", "trainer.max_epochs=1", train="ByWorker", world_size=2)
    assert summary["samples_seen"] == 13
    assert {each for rank in seen.values() for batch in rank for each in batch} == set(range(13))
    if workers == 2:
        assert seen["seen_0"][:2] == [[0, 2], [1, 3]], "the workers take turns, as those of a DataLoader"


@pytest.mark.slow
def test_whole_batches_are_dealt_as_they_come(over: Any) -> None:
    summary, seen = over("trainer.max_epochs=1", train="Batches", val="Batches", world_size=2)
    assert seen["seen_0"] == [[0, 1, 2], [6, 7, 8], [12]]
    assert seen["seen_1"][:2] == [[3, 4, 5], [9, 10, 11]]
    assert summary["samples_seen"] == 13


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["single", "fsdp", "ddp_pipeline", "ddp"])
def test_strategies(strategy: str, over: Any) -> None:
    world_size, wrap = 1 if strategy == "single" else 2, ["strategy.wrap=[net1,net2]"] if strategy == "fsdp" else []
    keys = ("data.global_batch_size=4", "trainer.accumulate_grad_batches=2", "trainer.gradient_clip_val=0.5")
    summary, _ = over(*keys, f"strategy={strategy}", *wrap, world_size=world_size)
    reference, _ = over(*keys, "strategy=single")
    assert summary["samples_seen"] == 26
    assert summary["global_step"] == reference["global_step"] == 4
    assert summary["metrics"]["val/loss"] == pytest.approx(reference["metrics"]["val/loss"], rel=1e-4)


@pytest.mark.slow
def test_limits_and_cadences(over: Any) -> None:
    summary, seen = over("trainer.limit_train_batches=2", "trainer.limit_val_batches=1", train="Endless", val="Endless")
    assert summary["global_step"] == 4
    assert seen["seen_0"] == [[0, 1], [2, 3]] * 2
    keys = ("trainer.max_steps=7", "trainer.val_check_interval=3", "trainer.max_epochs=-1", "scheduler=one_cycle")
    summary, _ = over(*keys, train="Endless", world_size=2)
    assert (summary["global_step"], summary["epoch"]) == (7, 0)
    log = (Path(summary["run_directory"]) / "train.log").read_text()
    assert [line.split("step ")[1][0] for line in log.splitlines() if "val/loss" in line] == ["3", "6"]
    assert log.count("an iterable-style set, whose order and end are its own") == 1
    assert "Each of 2 ranks reads the whole of it and keeps its share. A resumed run reads it again" in log


RESUMED = [
    ("Kept", (), 0),
    ("Kept", (), 2),
    ("Kept", ("data.replay=true",), 2),
    ("Sharded", (), 0),
    ("Sharded", ("data.shard_arguments={num_shards: world, index: rank}",), 2),
    ("ByWorker", (), 2),
]


@pytest.mark.parametrize("stop", slow_but([2], [2, 6], [2]))
@pytest.mark.parametrize(("train", "keys", "workers"), slow_but(RESUMED[:1], RESUMED, RESUMED[2:3]))
def test_resume_goes_on_with_the_same_bits(
    train: str, keys: tuple[str, ...], workers: int, stop: int, over: Any
) -> None:
    common = [*keys, f"data.num_workers={workers}", "checkpoint.every_n_steps=1", "checkpoint.save_top_k=-1"]
    whole, seen = over(*common, train=train, world_size=2)
    assert whole["global_step"] > stop
    resumed = [f"ckpt_path={whole['run_directory']}/checkpoints/step_{stop:08d}.pt"]
    again, rest = over(*common, *resumed, train=train, world_size=2)
    assert again["weights_sha256"] == whole["weights_sha256"]
    assert rest == {rank: steps[stop:] for rank, steps in seen.items()}


@pytest.mark.slow
def test_a_state_goes_on_at_once_and_a_replay_reads_again(over: Any, tmp_path: Path) -> None:
    keys = ("checkpoint.every_n_steps=1", "checkpoint.save_top_k=-1", "trainer.max_epochs=1")
    whole, _ = over(*keys, train="Kept")
    resumed = f"ckpt_path={whole['run_directory']}/checkpoints/step_00000004.pt"
    for replay, first in (("false", 8), ("true", 0)):
        reads = tmp_path / f"reads_{replay}"
        again, _ = over(*keys, resumed, f"data.replay={replay}", train=f"Kept, reads: {reads}")
        assert again["weights_sha256"] == whole["weights_sha256"]
        assert reads.read_text().split() == [str(number) for number in range(first, 13)]


@pytest.mark.slow
def test_a_shared_stream_goes_on_at_another_world_size_and_shards_do_not(over: Any) -> None:
    common = ("data.global_batch_size=4", "checkpoint.every_n_steps=2", "trainer.max_epochs=1")
    for train in ("Kept", "Numbers"):
        whole, _ = over(*common, train=train, world_size=2)
        resumed = f"ckpt_path={whole['run_directory']}/checkpoints/step_00000002.pt"
        for world_size in (1, 3):
            again, seen = over(*common, resumed, train=train, world_size=world_size)
            assert again["metrics"]["val/loss"] == pytest.approx(whole["metrics"]["val/loss"], rel=1e-4)
            assert global_batches(seen)[0] == [8, 9, 10, 11]
    shards = "data.shard_arguments={num_shards: world, index: rank}"
    whole, _ = over(*common, shards, train="Sharded", world_size=2)
    resumed = f"ckpt_path={whole['run_directory']}/checkpoints/step_00000002.pt"
    with pytest.raises(RequestError, match=r"was 2 rank\(s\) that read a shard each .*resume\.strict=false"):
        over(*common, shards, resumed, train="Sharded", world_size=3)
    over(*common, shards, resumed, "resume.strict=false", train="Sharded", world_size=3)
    whole, _ = over(*common, train="Batches", val="Batches", world_size=2)
    resumed = f"ckpt_path={whole['run_directory']}/checkpoints/step_00000002.pt"
    with pytest.raises(RequestError, match=r"was 2 rank\(s\) that take a whole batch each .*resume\.strict=false"):
        over(*common, resumed, train="Batches", val="Batches")


@pytest.mark.parametrize(
    ("train", "keys", "message"),
    [
        ("Numbers", ["strategy=ddp_exact"], "strategy=ddp_exact promises the same bits .*data.train, a Numbers, is an"),
        ("Numbers", ["trainer.limit_train_batches=0.5"], "limit_train_batches=0.5 is a fraction, .*Give a number of"),
        ("Numbers", ["trainer.val_check_interval=0.5"], "val_check_interval=0.5 is a fraction of an epoch"),
        ("Numbers", ["trainer.overfit_batches=1"], "overfit_batches=1 repeats the first batches, and data.train"),
        ("Numbers", ["data.weights=size"], "data.weights draws samples by their numbers"),
        ("Numbers", ["data.num_workers=1", "data.persistent_workers=true"], "data.persistent_workers=true, and data"),
        ("Numbers", ["scheduler=cosine"], r"scheduler\.T_max follows the length of the run.*of a stream trainer.max_s"),
        ("Numbers", ["scheduler=cosine", "scheduler.interval=epoch", "trainer.max_steps=9"], "scheduler.interval=step"),
        ("Numbers", ["plan=true"], "plan=true cuts an epoch's order in another way, and data.train"),
        ("Numbers", ["tune=batch_size"], "tune=batch_size cuts an epoch's order in another way"),
        ("Numbers", ["data.shard_arguments=yes"], "data.shard_arguments=.* does not say how a stream is sharded"),
        (
            "Numbers",
            ["data.shard_arguments={shards: world, shard: rank}"],
            "data.shard_arguments names shards, shard, ",
        ),
        (
            "Numbers",
            ["data.shard_arguments={_method_: split, n: world, i: rank}"],
            "Numbers .data.train. has no method split. Name one",
        ),
        ("Indexed", ["data.shard_arguments={size: world, first: rank}"], "shard_arguments deals iterable-style sets"),
        ("once", [], "data.train is a generator, an iterator, which can be read once"),
        ("Spent", [], "data.train is a Spent, an iterator, which can be read once"),
    ],
)
def test_what_a_stream_cannot_do_is_refused(train: str, keys: list[str], message: str, over: Any) -> None:
    with pytest.raises(RequestError, match=message):
        over(*keys, train=train)


@pytest.mark.slow
def test_failures_and_empty_streams_are_named(over: Any) -> None:
    with pytest.raises(
        (RunFailed, RuntimeError), match=r"OSError while data.train, a Failing, was read for its batch 1: the store"
    ):
        over(train="Failing", world_size=2)
    with pytest.raises(RunFailed, match=r"data.train, a Numbers, gives no batch\. Each call of its __iter__ has to"):
        over(train="Numbers, size: 0", world_size=2)
    with pytest.raises(RunFailed, match=r"Rank 2 gets no sample at all of data.train"):
        over("data.shard_arguments={num_shards: world, index: rank}", train="Sharded, size: 2", world_size=3)


@pytest.mark.slow
def test_modes_without_training(over: Any, run: Run) -> None:
    trained, _ = over()
    common = (f"ckpt_path={trained['last_checkpoint']}", "data.val_batch_size=2", "~data.val", "+data.val")
    stream, indexed = (f"{{_target_: iterable_parts.{name}, size: 7}}" for name in ("Numbers", "Indexed"))
    for mode in ("validate", "predict"):
        found = [
            run(f"mode={mode}", *common[:-1], f"+data.val={node}", world_size=size)
            for node, size in ((stream, 1), (stream, 2), (stream, 3), (indexed, 1))
        ]
        if mode == "validate":
            assert all(each["metrics"] == pytest.approx(found[-1]["metrics"]) for each in found)
        else:
            import torch

            rows = [torch.load(Path(each["run_directory"]) / "predictions.pt") for each in found]
            assert len(rows[-1]) == 7
            assert all(torch.allclose(each, rows[-1]) for each in rows)
    with pytest.raises(RequestError, match=r"mode=predict writes a row for each sample in their order"):
        run("mode=predict", *common[:-1], f"+data.val={stream}", "data.num_workers=2")


@pytest.mark.slow
def test_equivalence_and_the_learning_rate_finder_run(over: Any) -> None:
    summary, _ = over("check=equivalence", "check_steps=3", val="", world_size=2)
    assert summary["status"] == "finished"
    summary, _ = over("tune=lr", "tune_steps=20", val="", train="Endless")
    assert summary["metrics"]["tune/lr"] > 0


@pytest.fixture
def lightning(tmp_path: Path) -> Callable[..., Summary]:
    """Run a Lightning module with a data module of streams."""
    keys = ["data=lightning", "data.datamodule._target_=iterable_parts.Streams", "task=lightning", "model=toy"]
    keys += ["model._target_=iterable_parts.Module", "data.in_features=10", "data.out_features=5", "logger=none"]
    count = 0

    def train(*overrides: str, world_size: int = 1) -> Summary:
        nonlocal count
        count += 1
        return run_recipe([*keys, "trainer.max_epochs=2", *overrides], world_size, tmp_path / f"run_{count}")

    return train


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_loaders_of_a_lightning_data_module(strategy: str, lightning: Callable[..., Summary]) -> None:
    one = lightning("strategy=single", "data.global_batch_size=4")
    assert (one["global_step"], one["samples_seen"]) == (6, 24)
    for number in (0, 2) if strategy == "ddp" else (0,):
        keys = (f"+data.datamodule.workers={number}", "data.global_batch_size=4", *STRATEGIES[strategy])
        two = lightning(*keys, world_size=2)
        assert two["samples_seen"] == 24
        assert two["metrics"]["val/loss"] == pytest.approx(one["metrics"]["val/loss"], rel=1e-4)


@pytest.mark.slow
def test_a_loader_says_how_its_workers_begin_and_how_long_they_may_take(lightning: Callable[..., Summary]) -> None:
    spawned = ("+data.datamodule.kind=Spawned", "+data.datamodule.multiprocessing_context=spawn")
    spawned += ("+data.datamodule.workers=1", "trainer.max_epochs=1")
    assert lightning(*spawned)["samples_seen"] == 12
    with pytest.raises(RuntimeError, match="DataLoader timed out after 9 seconds"):
        lightning(*spawned, "+data.datamodule.timeout=9", "+data.datamodule.size=12")


@pytest.mark.slow
def test_a_data_worker_that_is_still_starting_as_its_rank_ends_does_not_go_on(
    lightning: Callable[..., Summary],
) -> None:
    """Each test sees to it that no process is left."""
    spawned = ("+data.datamodule.kind=Late", "+data.datamodule.multiprocessing_context=spawn")
    with pytest.raises(RuntimeError, match="DataLoader timed out after 1 seconds"):
        lightning(*spawned, "+data.datamodule.workers=1", "+data.datamodule.timeout=1")


@pytest.mark.slow
def test_streams_of_lightning_that_deal_themselves(lightning: Callable[..., Summary]) -> None:
    once = "trainer.max_epochs=1"
    with pytest.raises(RunFailed, match=r"ByRank, gives other samples on rank 1"):
        lightning("+data.datamodule.kind=ByRank", world_size=2)
    own = lightning("+data.datamodule.kind=ByRank", "data.shard_arguments=own", once, world_size=2)
    assert own["samples_seen"] == 12, "drop_last=True"
    batched = lightning("+data.datamodule.kind=Batches", "+data.datamodule.batch_size=null", once, world_size=2)
    assert batched["samples_seen"] == 13
    bare = lightning("+data.datamodule.kind=Batches", "+data.datamodule.bare=true", once, world_size=2)
    assert (bare["samples_seen"], bare["weights_sha256"]) == (13, batched["weights_sha256"])
    with pytest.raises(RequestError, match=r"The loader for train is a Indexed\. Allowed: .*whose __iter__ gives"):
        lightning("+data.datamodule.kind=Indexed", "+data.datamodule.bare=true")
    begun = lightning("+data.datamodule.begins=true", "+data.datamodule.workers=2", once, world_size=2)
    assert begun["samples_seen"] == 8, "worker_init_fn gives each worker a half, and drops what fills no batch of 4"
    with pytest.raises(RequestError, match=r"Numbers \(data.train\) has no method . Name one of it as _method_"):
        lightning("data.shard_arguments={size: world, first: rank}")


@pytest.mark.slow
@needs("datasets")
@pytest.mark.parametrize(("keys", "workers"), [([], 0), (BY_METHOD, 2), *at_night(([], 2)), *at_night((BY_METHOD, 0))])
def test_hugging_face_streams(keys: list[str], workers: int, over: Any, tmp_path: Path) -> None:
    for number in range(4):
        rows = [{"number": 10 * number + row, "target": [0.5] * 5} for row in range(5 + number)]
        (tmp_path / f"part_{number}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    files = str(tmp_path / "*.jsonl")
    common = [f"data.num_workers={workers}", "data.collate_fn=iterable_parts.of_rows", *keys]
    common += ["checkpoint.every_n_steps=1", "checkpoint.save_top_k=-1"]
    train = f"rows_of, files: '{files}'"
    whole, seen = over(*common, train=train, val=train, world_size=2)
    assert whole["samples_seen"] == 2 * (5 + 6 + 7 + 8)
    resumed = f"ckpt_path={whole['run_directory']}/checkpoints/step_00000003.pt"
    again, rest = over(*common, resumed, train=train, val=train, world_size=2)
    assert again["weights_sha256"] == whole["weights_sha256"]
    assert rest == {rank: steps[3:] for rank, steps in seen.items()}


@pytest.mark.parametrize("train", ["Numbers", "Batches"])
def test_operations_are_those_of_its_samples(train: str, over: Any) -> None:
    """Whatever a batch of the set's own has of them."""
    summary, _ = over("trainer.peak_flops=1e9", "strategy=single", train=train)
    of_sample = 2 * 2 * (10 * 10 + 10 * 5) + 2 * 10 * 5
    assert summary["flops_per_step"] == 2 * of_sample
