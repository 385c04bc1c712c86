"""However a step is divided, it is the same step: over ranks, over micro-batches, over devices."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ddp_recipes.reporting.run_directory import Summary
from helpers.marks import slow_but

Run = Callable[..., Summary]
Weights = Callable[[Summary], dict[str, Any]]

LEARNING = {
    "uneven last batch": ["data.num_samples=61"],
    "fewer samples than ranks in the last batch": ["data.num_samples=49"],
    "strided": ["data.num_samples=61", "data.shard=strided"],
    "drop_last": ["data.num_samples=61", "data.drop_last=true"],
    "accumulation, last group uneven": ["data.num_samples=75", "trainer.accumulate_grad_batches=3"],
    "clipped by norm": ["data.num_samples=61", "trainer.gradient_clip_val=0.05"],
    "clipped by value": [
        "data.num_samples=61",
        "trainer.gradient_clip_val=0.01",
        "trainer.gradient_clip_algorithm=value",
    ],
    "adamw, cosine": ["data.num_samples=61", "optimizer=adamw", "optimizer.lr=0.01", "scheduler=cosine"],
    "toy_mp": ["data.num_samples=61", "model=toy_mp"],
}


def assert_same_weights(one: dict[str, Any], other: dict[str, Any], atol: float = 1e-6) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=atol)


@pytest.mark.parametrize("name", slow_but(["uneven last batch"], LEARNING, ["toy_mp"]))
def test_ranks_learn_what_one_process_learns(name: str, run: Run, weights: Weights) -> None:
    overrides = ["data.global_batch_size=16", *LEARNING[name]]
    one = run(*overrides)
    for world_size in (2, 3) if name == "uneven last batch" else (3,):
        several = run(*overrides, world_size=world_size)
        assert several["world_size"] == world_size
        assert_same_weights(weights(several), weights(one))
        assert several["samples_seen"] == one["samples_seen"]
        assert several["global_step"] == one["global_step"]
        for summary in (one, several):
            summary["metrics"].pop("train/samples_per_second", None)  # which is no result of learning
        assert several["metrics"] == pytest.approx(one["metrics"], rel=1e-5)


def test_training_changes_the_weights(run: Run, weights: Weights) -> None:
    """What is equal above is not just the start."""
    start, end = weights(run("optimizer.lr=0")), weights(run())
    assert all((start[name] - end[name]).abs().max() > 0.01 for name in start)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("samples", [64, 61])
def test_accumulated_batches_are_one_larger_batch(samples: int, world_size: int, run: Run, weights: Weights) -> None:
    large = run(f"data.num_samples={samples}", "data.global_batch_size=24", world_size=world_size)
    small = run(
        f"data.num_samples={samples}",
        "data.global_batch_size=8",
        "trainer.accumulate_grad_batches=3",
        world_size=world_size,
    )
    assert small["global_step"] == large["global_step"] == 2 * 3
    assert_same_weights(weights(small), weights(large))


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_model_over_two_devices_learns_what_it_learns_on_one(world_size: int, run: Run) -> None:
    toy, toy_mp = (run(f"model={model}", world_size=world_size) for model in ("toy", "toy_mp"))
    assert toy["weights_sha256"] == toy_mp["weights_sha256"]
    assert (toy["devices_per_replica"], toy_mp["devices_per_replica"]) == (1, 2)


def test_strategies_agree_on_one_process(run: Run) -> None:
    runs = [run(f"strategy={strategy}") for strategy in ("single", "dp", "ddp")]
    assert [one["strategy"] for one in runs] == ["single", "dp", "ddp"]
    assert len({one["weights_sha256"] for one in runs}) == 1


def test_a_run_is_repeatable(run: Run) -> None:
    overrides = ["model._target_=own_parts.Dropout", "data.train._target_=own_parts.OneByOne"]
    assert run(*overrides, world_size=2)["weights_sha256"] == run(*overrides, world_size=2)["weights_sha256"]
    assert run(*overrides)["weights_sha256"] != run(*overrides, "seed=7")["weights_sha256"]


def test_workers_do_not_change_a_run(run: Run) -> None:
    overrides = ["model._target_=own_parts.Dropout", "data.train._target_=own_parts.OneByOne"]
    assert run(*overrides)["weights_sha256"] == run(*overrides, "data.num_workers=2")["weights_sha256"]


@pytest.mark.slow
def test_how_samples_are_read_does_not_change_what_dropout_draws(run: Run) -> None:
    whole = run("model._target_=own_parts.Dropout")
    plain = "data.val._target_=own_parts.OneByOne"
    assert run("model._target_=own_parts.Dropout", plain)["weights_sha256"] == whole["weights_sha256"]


@pytest.mark.slow
def test_ranks_drop_other_units(run: Run, weights: Weights) -> None:
    """With one sample shown to both ranks, the same masks would give the gradient of one rank."""
    overrides = ["model._target_=own_parts.Dropout", "data.num_samples=1", "data.shuffle=false", "trainer.max_epochs=3"]
    one = weights(run(*overrides))
    two = weights(run("data.num_samples=2", *overrides[:1], *overrides[2:], world_size=2))
    assert any((one[name] - two[name]).abs().max() > 1e-4 for name in one)
