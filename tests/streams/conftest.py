"""Sets in shards, tiny, and runs on them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddp_recipes.reporting.run_directory import Summary
from helpers.ranks import run_recipe
from helpers.shards import CUTS, ROWS, write_shards

QUICK = (
    "data=stream",
    "data.inputs=[a,b]",
    "data.targets=[y]",
    "data.in_features=2",
    "data.out_features=1",
    "data.batch_size=4",
    "data.val_fraction=0.2",
    "data.window=12",
    "data.interleave=3",
    "task=regression",
    "model=mlp",
    "model.hidden_features=[3]",
    "trainer.max_epochs=2",
    "trainer.progress=false",
    "logger=none",
    "launcher.device=cpu",
)


@pytest.fixture
def shards(tmp_path: Path) -> Callable[..., Path]:
    """Write the rows of ``stream_parts.ROWS`` as shards of a format: ``shards("parquet")``; return their folder."""

    def write(suffix: str, rows: list[dict[str, Any]] = ROWS, cuts: tuple[int, ...] = CUTS) -> Path:
        return write_shards(tmp_path / f"set{suffix}", suffix, rows, cuts)

    return write


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Summary]:
    """Run a tiny recipe on shards: ``run(folder, *overrides, world_size=1, directory=None)``."""
    count = 0

    def quick(path: Path | str, *overrides: str, world_size: int = 1, directory: Path | None = None) -> Summary:
        nonlocal count
        count += 1
        directory = directory or tmp_path / f"run_{count}"
        given = [*QUICK, f"data.path={path}", f"data.cache.folder={tmp_path / 'cache'}", *overrides]
        return run_recipe(given, world_size, directory)

    return quick
