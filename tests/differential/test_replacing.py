"""Recipes drawn from what goes together, of which ranks are lost and replaced: as if nothing had happened."""

import json
import os
import subprocess
from pathlib import Path
from random import Random

import pytest
from differential.recipes import ALWAYS, REFUSED, STRATEGIES, drawn, left_by

from helpers.patience import patience
from helpers.recipes import QUICK

SEED = int(os.environ.get("DDP_RECIPES_TEST_SEED", "11"))  # the same every day; others by night, by hand
FEW, MANY = 3, 100
HERE = Path(__file__).parent
EVENTS = (
    *("on_start", "on_epoch_start", "on_step", "on_epoch_end", "on_validation_start", "on_validation"),
    *("on_validation_end", "on_save_start", "on_save", "on_end"),
)
# Of a state that is kept in memory all start again where no rank has what the lost one had.
WAYS = ("", "", "checkpoint.in_memory_every_n_steps=1")


def ended(python: str, folder: Path, *overrides: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a recipe in a folder."""
    folder.mkdir()
    paths = os.pathsep.join(map(str, (HERE, HERE.parent / "distributed", HERE.parent)))
    return subprocess.run(
        [python, "-m", "ddp_recipes", *overrides, "hydra.run.dir=run"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([paths, os.environ.get("PYTHONPATH", "")]), **environ},
        capture_output=True,
        text=True,
        timeout=patience(180),
    )


def losses_of(random: Random, steps: int, ranks: int) -> str:
    """Return one loss or two, as ``resuming_parts.Losing`` takes them."""
    return ";".join(
        f"{random.randrange(steps + 1)} {random.randrange(ranks)} {random.choice(EVENTS)} "
        f"{random.choice(('raise', 'SIGKILL', 'SIGKILL'))}"
        for _ in range(random.choice((1, 1, 2)))
    )


@pytest.mark.parametrize(
    "number", [*range(FEW), *(pytest.param(number, marks=pytest.mark.nightly) for number in range(FEW, MANY))]
)
@pytest.mark.slow
@pytest.mark.spawn
def test_a_run_that_loses_ranks_ends_as_if_it_had_not(number: int, tmp_path: Path, python: str) -> None:
    random = Random(f"{SEED} {number} replaced")
    overrides, ranks, _ = drawn(random, [each for each in STRATEGIES if "single" not in each])
    ranks = max(2, ranks)
    own = [
        *QUICK,
        *ALWAYS,
        *overrides,
        f"launcher.nproc_per_node={ranks}",
        "+callbacks.losing._target_=resuming_parts.Losing",
    ]
    whole = ended(python, tmp_path / "whole", *own)
    if whole.returncode == 2 or any(words in whole.stderr for words in REFUSED):
        return print("refused")
    assert whole.returncode == 0, whole.stderr
    expected = left_by(tmp_path / "whole/run", json.loads((tmp_path / "whole/run/summary.json").read_text()))
    steps = len({row["step"] for row in expected["rows"] if "train/loss" in row})
    losses = losses_of(random, steps, ranks)
    more = [f"launcher.replace_ranks={1 + losses.count(';')}", *random.choice(WAYS).split()]
    script = f"{' '.join(overrides)}; {ranks} ranks, lost at {losses}; {' '.join(more)}"
    found = ended(python, tmp_path / "parts", *own, *more, LOSES=losses)
    if found.returncode == 2:  # a state in memory that nobody would read, say
        return print("refused:", more)
    assert found.returncode == 0, f"{script}\n{found.stderr}"
    left = left_by(tmp_path / "parts/run", json.loads((tmp_path / "parts/run/summary.json").read_text()))
    different = {key: (expected[key], left[key]) for key in expected if expected[key] != left[key]}
    assert not different, f"{script}\n{json.dumps(different, indent=1)[:3000]}\n{found.stderr}"
    print(f"same: {script}\n{found.stderr}")
