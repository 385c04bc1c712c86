"""Runs on streams: the same batches and bits at any world size, with data workers, and resumed at another size."""

import hashlib
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch

from ddp_recipes.data.loader import Loader
from ddp_recipes.data.order import BatchPlan
from ddp_recipes.reporting.run_directory import Summary
from ddp_recipes.streams import Stream
from helpers.shards import ROWS, Noise, write_shards

pytest.importorskip("pyarrow")

Run = Callable[..., Summary]
EXACT = ("strategy=ddp_exact", "data.train.transform={_target_: helpers.shards.Noise}", "data.global_batch_size=13")


def batches_of(stream: Stream, world: int, workers: int, sharding: str, start: int = 0) -> list[str]:
    """Return the hash of each global batch of the second epoch, in the order of the whole batch."""
    plan = BatchPlan(stream.sample_order(5, True), 10, world, seed=5, sharding=sharding)
    loaders = [
        Loader(stream, plan, torch.device("cpu"), shards=range(rank, rank + 1), num_workers=workers)
        for rank in range(world)
    ]
    found = []
    for each in zip(*(loader.batches(1, start) for loader in loaders), strict=True):
        rows = [row for batch in each for row in torch.cat(batch.data, 1)[: batch.num_samples].tolist()]
        assert len(rows) == plan.size(each[0].number)
        found.append(hashlib.sha256(str(sorted(rows)).encode()).hexdigest())
    for loader in loaders:
        loader.close()
    return found


@pytest.mark.parametrize("suffix", [".parquet", pytest.param(".jsonl", marks=pytest.mark.slow)])
def test_global_batches_are_the_same_for_any_ranks_workers_and_start(suffix: str, shards: Callable[..., Path]) -> None:
    """Also of what samples draw at random, where nothing divides, and where one row group is in memory at a time."""
    stream = Stream(
        str(shards(suffix)), inputs=["a", "b"], targets=["y"], transform=Noise(), window=12, interleave=3, memory_mb=0
    )
    expected = batches_of(stream, 1, 0, "strided")
    assert len({*expected}) == 7
    for world, workers, sharding in product((1, 2, 3), (0, 1), ("strided", "contiguous")):
        assert batches_of(stream, world, workers, sharding) == expected, (world, workers, sharding)
    assert batches_of(stream, 3, 0, "strided", start=4) == expected[4:]


@pytest.mark.slow
def test_weights_are_the_same_bits_for_any_ranks_workers_and_resumes(run: Run, shards: Callable[..., Path]) -> None:
    folder = shards(".parquet")
    hashes = {
        (world, workers): run(folder, *EXACT, f"data.num_workers={workers}", world_size=world)["weights_sha256"]
        for world, workers in ((1, 0), (1, 1), (2, 0), (3, 1))
    }
    expected = hashes[1, 0]
    for first, then in ((1, 3), (3, 2), (2, 1)):
        some = run(folder, *EXACT, "trainer.max_steps=5", world_size=first)
        rest = run(folder, *EXACT, f"ckpt_path={some['last_checkpoint']}", world_size=then)
        hashes[first, then, "resumed"] = rest["weights_sha256"]
        assert rest["global_step"] == 8
    assert hashes == dict.fromkeys(hashes, expected)
    assert run(folder, *EXACT, "seed=43")["weights_sha256"] != expected


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_other_strategies_train_on_the_same_batches(strategy: str, run: Run, shards: Callable[..., Path]) -> None:
    own = ("strategy.shards=2",) if strategy == "fsdp" else ()
    given = (shards(".jsonl"), f"strategy={strategy}", *own, "data.global_batch_size=13")
    one, two = run(*given), run(*given, world_size=2)
    assert one["samples_seen"] == two["samples_seen"] == 2 * 49
    assert two["metrics"]["val/loss"] == pytest.approx(one["metrics"]["val/loss"], rel=1e-5)
    if strategy == "fsdp":
        assert one["weights_sha256"] == two["weights_sha256"]


def test_a_run_trains_on_shards_and_validates_on_others(run: Run, shards: Callable[..., Path], tmp_path: Path) -> None:
    val = write_shards(tmp_path / "val", ".csv", ROWS[:9], (0, 9))
    summary = run(shards(".jsonl"), f"data.val_path={val}", "data.val.split=val")
    assert summary["samples_seen"] == 2 * 61
    assert summary["metrics"]["val/loss"] > 0
