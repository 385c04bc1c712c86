"""What ``strategy=fsdp`` can be told: blocks by size."""

from collections.abc import Callable
from pathlib import Path

import pytest

from ddp_recipes.errors import RequestError
from ddp_recipes.models import GPT
from ddp_recipes.reporting.run_directory import Summary
from ddp_recipes.strategies.fsdp.blocks import blocks_of
from ddp_recipes.testing import run_recipe
from helpers.exact import QUIET

Run = Callable[..., Summary]

FSDP = ["strategy=fsdp", "strategy.shards=6"]
TOY = "strategy.wrap=[net1,net2]"


@pytest.fixture
def gpt(tmp_path: Path) -> list[str]:
    """A transformer with a tied embedding, two layers and a few steps of six samples."""
    (tmp_path / "words.txt").write_text("to be or not to be, that is the question; " * 60)
    return [
        *("data=text", f"data.path={tmp_path / 'words.txt'}", "data.context=16", "data.val_fraction=0.2"),
        *("data.global_batch_size=6", "model=gpt", "model.layers=2", "model.width=12", "model.heads=2"),
        *("model.dropout=0.1", "optimizer=adamw", "trainer.max_steps=4", "trainer.val_check_interval=4"),
        *("trainer.log_every_n_steps=1", "trainer.gradient_clip_val=0.5", "trainer.num_sanity_val_steps=0"),
        *("trainer.progress=false", "logger=none", "launcher.device=cpu"),
    ]


# --- blocks by size --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("least", "expected"),
    [
        (600, [f"blocks.{at}{inside}" for at in (0, 1) for inside in (".attention", ".mlp.0", "")]),
        (1200, ["blocks.0.mlp", "blocks.1.mlp", "blocks"]),
        (1500, ["blocks.0", "blocks.1"]),
    ],
)
def test_blocks_by_size_are_the_innermost_large_enough(least: int, expected: list[str]) -> None:
    model = GPT(context=16, layers=2, width=12, heads=2)  # its embedding is in two places
    assert blocks_of(model, least) == expected


def test_blocks_do_not_change_bits(gpt: list[str], tmp_path: Path) -> None:
    exact = run_recipe([*gpt, "strategy=ddp_exact", "strategy.shards=6"], 1, tmp_path / "exact")
    for size, least in ((1, 1200), (2, 600), (3, 1200)):
        dealt = run_recipe([*gpt, *FSDP, f"strategy.wrap={least}"], size, tmp_path / f"{size}")
        assert dealt["weights_sha256"] == exact["weights_sha256"], f"{size} ranks, blocks of {least}"
        assert dealt["metrics"]["val/loss"] == exact["metrics"]["val/loss"]


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["strategy.wrap=1000"], r"strategy.wrap=1000: no module of Toy has so many numbers.* its net1 has"),
        (["strategy.wrap=0"], r"strategy.wrap=0 is not allowed. Allowed: a whole number at least 1, or text"),
    ],
)
def test_what_cannot_be_is_refused_by_name(overrides: list[str], message: str, run: Run) -> None:
    with pytest.raises(RequestError, match=message):
        run(*QUIET, "strategy=fsdp", *overrides, world_size=2)
