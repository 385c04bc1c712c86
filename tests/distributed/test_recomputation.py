"""Activations that are computed again in backward: the same bits, less memory."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ddp_recipes.errors import RequestError
from ddp_recipes.reporting.run_directory import Summary
from helpers.ranks import run_recipe

AGAIN = "model.activation_checkpointing=true"
GPT = ["data=text", "data.context=16", "data.val_fraction=0.2", "model=gpt", "model.layers=4", "model.width=16"]
GPT += ["model.heads=2", "model.dropout=0.1", "model.tied=false", "trainer.max_steps=3", "data.global_batch_size=12"]
NORM = ["data=random", "data.num_samples=64", "model=toy", "model._target_=own_parts.Norm", "data.global_batch_size=16"]
QUIET = ["logger=none", "trainer.progress=false", "launcher.device=cpu"]

Train = Callable[..., Summary]


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """Run a recipe: ``train(*overrides, world_size=1)``."""
    (tmp_path / "words.txt").write_text("to be or not to be, that is the question; " * 60)
    count = 0

    def started(*overrides: str, world_size: int = 1) -> Summary:
        nonlocal count
        count += 1
        path = [f"data.path={tmp_path}/words.txt"] if "data=text" in overrides else []
        return run_recipe([*QUIET, *overrides, *path], world_size, tmp_path / f"run_{count}")

    return started


@pytest.mark.parametrize(
    ("overrides", "world_size"),
    [
        pytest.param([*GPT, "strategy=ddp"], 2, marks=pytest.mark.slow),
        pytest.param([*GPT, "strategy=ddp_pipeline"], 2, marks=pytest.mark.slow),
        pytest.param([*GPT, "strategy=single", "model.num_devices=2"], 1, marks=pytest.mark.nightly),
        pytest.param(
            [*GPT, "strategy=single", "trainer.precision=bf16-mixed", "trainer.accumulate_grad_batches=2"],
            1,
            marks=pytest.mark.slow,
        ),
        ([*NORM, "strategy=ddp_exact", "strategy.shards=4", "trainer.max_epochs=2"], 2),
    ],
    ids=["ddp", "pipeline", "split", "bf16", "batch_norm_exact"],
)
def test_weights_and_buffers_are_the_same_bits(overrides: list[str], world_size: int, train: Train) -> None:
    kept = train(*overrides, world_size=world_size)
    assert train(*overrides, AGAIN, world_size=world_size)["weights_sha256"] == kept["weights_sha256"]


@pytest.mark.slow
def test_a_dry_run_shows_what_it_saves(train: Train) -> None:
    plans = []
    for again in ("false", "[blocks.1,blocks.2]", "true"):
        done = train(*GPT, "plan=true", "strategy=single", f"model.activation_checkpointing={again}")
        plans.append(json.loads((Path(done["run_directory"]) / "plan.json").read_text()))
    kept, half, none = (plan["memory"][0]["activations"] for plan in plans)
    assert none < 0.4 * kept
    assert none < half < kept


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model=toy", AGAIN], r"Toy has none with parameters. Name its blocks: net1, relu, net2\."),
        (["model=toy", "model.activation_checkpointing=[net3]"], r"net3 matches no module\..* Did you mean 'net\d'\?"),
    ],
)
def test_what_is_no_block_is_refused(overrides: list[str], message: str, train: Train) -> None:
    with pytest.raises(RequestError, match=message):
        train("data=random", "strategy=single", *overrides)
