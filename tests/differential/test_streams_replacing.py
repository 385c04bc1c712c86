"""Data of every kind, as ``test_streams.py`` draws it, under ranks that are lost and replaced: as if none had been."""

import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest
from differential import test_streams
from differential.recipes import ended, left_by, losses_of, see_same
from differential.test_streams import Case, available, drawn, overrides_of

pytest.importorskip("pyarrow")
pytestmark = [pytest.mark.slow, pytest.mark.spawn]

SEED = int(os.environ.get("DDP_RECIPES_TEST_SEED", "17"))  # the same every day; others by night, by hand
FEW, MANY = 1, 90
TOO_FEW_FILES = "list index out of range\nThis came of shard("  # Hugging Face's own, where ranks are more than files


def _drawn(random: Random, folder: Path, kind: str) -> Iterator[Case]:
    for number in count():
        (own := folder / f"data_{number}").mkdir()
        yield drawn(random, own, kind)


@pytest.mark.parametrize(
    "number", [*range(FEW), *(pytest.param(number, marks=pytest.mark.nightly) for number in range(FEW, MANY))]
)
def test_a_run_that_loses_ranks_sees_what_one_does_that_does_not(number: int, tmp_path: Path, python: str) -> None:
    random = Random(f"{SEED} {number} streams")
    kinds = available()
    case = next(case for case in _drawn(random, tmp_path, kinds[number % len(kinds)]) if case.ranks > 1)

    def train(name: str, *more: str, **environ: str) -> Any:
        overrides = [*overrides_of(case, tmp_path), *more, f"launcher.nproc_per_node={case.ranks}", "logger=csv"]
        return ended(python, tmp_path / name, *overrides, "+callbacks.losing._target_=resuming_parts.Losing", **environ)

    whole = train("whole")
    if whole.returncode == 2 or any(words in whole.stderr for words in (*test_streams.ON_THE_WAY, TOO_FEW_FILES)):
        return print("refused:", case, whole.stderr[-300:])
    assert whole.returncode == 0, f"{case}\n{whole.stderr}"
    expected = left_by(tmp_path / "whole/run")
    steps = len({row["step"] for row in expected["rows"] if "train/loss" in row})
    losses = losses_of(random, steps, case.ranks)
    script = f"{case}; lost at {losses}"
    found = train("parts", f"launcher.replace_ranks={1 + losses.count(';')}", LOSES=losses)
    if found.returncode == 2:
        return print("refused:", case, found.stderr[-300:])
    assert found.returncode == 0, f"{script}\n{found.stderr}"
    see_same(expected, left_by(tmp_path / "parts/run"), f"{script}\n{found.stderr}")
    print(f"same: {script}\n{found.stderr}")
