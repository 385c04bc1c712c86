"""Losses that are no mean over samples: the same numbers on any number of ranks, or said."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ddp_recipes.errors import RequestError
from ddp_recipes.reporting.run_directory import Summary
from helpers.marks import slow_but

Run = Callable[..., Summary]

DATA = [
    "data.train._target_=own_parts.Ignoring",
    "data.global_batch_size=12",
    "trainer.max_epochs=2",
    "task=classification",
]
DATA += ["data.val._target_=own_parts.Ignoring", "data.val.num_samples=29", "model.out_features=2", "optimizer.lr=0.5"]
CLASSES = ["+task.loss.weight=[1.0, 8.0]", "+data.train.ignores=false", "+data.val.ignores=false"]
NAMED = ["+data.train.named=true", "+data.val.named=true", "task=model_loss", "model._target_=own_parts.Ignorant"]
LOSSES = {
    "ignored": ["task.mean_over=targets"],
    "weights of classes": CLASSES,
    "ignored, by the model": [*NAMED, "task.mean_over=targets"],
}
WAYS = {  # to run a step's twelve samples: overrides and ranks
    "ddp": (["strategy=ddp"], 3),
    "accumulated": (["strategy=ddp", "data.global_batch_size=6", "trainer.accumulate_grad_batches=2"], 2),
    "ddp_exact": (["strategy=ddp_exact", "strategy.shards=4"], 2),
    "fsdp": (["strategy=fsdp", "strategy.wrap=[net1]"], 2),
    "sharded": (["strategy=fsdp", "strategy.wrap=[net1]", "strategy.shards=4"], 2),
    "parameter_server": (["strategy=parameter_server"], 3),
}


def close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    return all(torch.allclose(found[name], expected[name], rtol=1e-4, atol=1e-6) for name in expected)


@pytest.fixture
def trained(run: Run, weights: Callable[[Any], dict[str, Any]]) -> Callable[..., tuple[dict[str, Any], Summary]]:
    """Return what trains with overrides on so many ranks; it returns the last weights, and the summary."""

    def train(*overrides: str, ranks: int = 1) -> tuple[dict[str, Any], Summary]:
        summary = run(*DATA, "checkpoint=default", *overrides, world_size=ranks)
        return weights(summary), summary

    return train


@pytest.mark.parametrize(
    ("loss", "way"),
    slow_but(
        [("weights of classes", "ddp")],
        [(loss, way) for way in WAYS for loss in LOSSES],
        [("ignored", way) for way in WAYS] + [("ignored, by the model", "ddp")],
    ),
)
def test_ranks_and_batches_weigh_as_much_as_their_targets(
    loss: str, way: str, trained: Callable[..., tuple[dict[str, Any], Summary]]
) -> None:
    alone, of_one = trained("strategy=single", *LOSSES[loss])
    own, ranks = WAYS[way]
    together, of_all = trained(*LOSSES[loss], *own, ranks=ranks)
    assert close(together, alone)
    for name in ("val/loss", "train/loss"):
        assert of_all["metrics"][name] == pytest.approx(of_one["metrics"][name], rel=1e-4)
    if loss == "weights of classes":  # of the others a rank may have none that counts, and so a loss of NaN
        by_samples, _ = trained(*LOSSES[loss], "task.mean_over=samples", *own, ranks=ranks)
        assert not close(by_samples, alone)


@pytest.mark.parametrize("mean_over", ["auto", "targets"])
def test_a_step_of_ones_own_is_asked_what_its_loss_is_a_mean_over(
    mean_over: str, trained: Callable[..., tuple[dict[str, Any], Summary]], run: Run
) -> None:
    own = [*CLASSES, "task._target_=own_parts.Shifting", f"task.mean_over={mean_over}"]
    alone, of_one = trained("strategy=single", *own)
    together, of_both = trained(*own, ranks=2)
    asked = "Set task.mean_over=targets" in (Path(of_both["run_directory"]) / "train.log").read_text()
    assert asked == (mean_over == "auto") != close(together, alone)
    measured = [*DATA, *own, "mode=validate", f"ckpt_path={of_one['run_directory']}", "data.val_batch_size=5"]
    losses = [run(*measured, world_size=ranks)["metrics"]["val/loss"] for ranks in (1, 2)]
    assert losses == pytest.approx([of_one["metrics"]["val/loss"]] * 2, rel=1e-6)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["data.train.num_samples=12"], "task.mean_over=targets"),
        pytest.param(LOSSES["ignored"], "", marks=pytest.mark.slow),
        pytest.param([*NAMED, "data.train.num_samples=12"], "task.mean_over=following", marks=pytest.mark.slow),
    ],
)
def test_targets_that_do_not_count_are_said_where_batches_weigh_as_much_as_their_samples(
    overrides: list[str], said: str, trained: Callable[..., tuple[dict[str, Any], Summary]]
) -> None:
    _, summary = trained(*overrides, ranks=2)
    log = (Path(summary["run_directory"]) / "train.log").read_text()
    assert log.count("The first batch has targets that do not count") == bool(said)
    assert said in log


@pytest.mark.parametrize(
    ("overrides", "ranks", "message"),
    [
        (["task.mean_over=tokens"], 1, "task.mean_over=tokens is not known. Allowed: auto, samples, targets"),
        (["task.mean_over=targets", "task.loss._target_=torch.nn.MSELoss"], 1, "task.loss is a MSELoss: only of"),
        (["+task.loss.weight=[1.0]"], 2, "task.loss.weight has 1 weights, and the model 2 outputs. Give one for each"),
        (["strategy=ddp_pipeline", *CLASSES], 2, "averages micro-batches by their samples. Set task.mean_over=samples"),
        (["strategy=parameter_server", "strategy.staleness=1", *CLASSES], 3, "Set task.mean_over=samples, or"),
    ],
)
def test_what_cannot_weigh_so_is_refused(overrides: list[str], ranks: int, message: str, run: Run) -> None:
    with pytest.raises(RequestError, match=message):
        run(*DATA, *overrides, world_size=ranks)
