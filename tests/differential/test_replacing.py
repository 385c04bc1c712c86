"""Recipes drawn from what goes together, of which ranks are lost and replaced: as if nothing had happened."""

import json
import os
from pathlib import Path
from random import Random

import pytest
from differential.recipes import ALWAYS, REFUSED, STRATEGIES, drawn, ended, left_by, losses_of, see_same

from helpers.patience import patience
from helpers.recipes import QUICK

SEED = int(os.environ.get("DDP_RECIPES_TEST_SEED", "11"))  # the same every day; others by night, by hand
FEW, MANY = 2, 100
# Of a state that is kept in memory all start again where no rank has what the lost one had.
WAYS = ("", "", "checkpoint.in_memory_every_n_steps=1")


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
    expected = left_by(tmp_path / "whole/run")
    steps = len({row["step"] for row in expected["rows"] if "train/loss" in row})
    losses = losses_of(random, steps, ranks)
    more = [f"launcher.replace_ranks={1 + losses.count(';')}", *random.choice(WAYS).split()]
    script = f"{' '.join(overrides)}; {ranks} ranks, lost at {losses}; {' '.join(more)}"
    found = ended(python, tmp_path / "parts", *own, *more, LOSES=losses)
    if found.returncode == 2:  # a state in memory that nobody would read, say
        return print("refused:", more)
    assert found.returncode == 0, f"{script}\n{found.stderr}"
    left = left_by(tmp_path / "parts/run")
    if "checkpoint.async_save=true" in own and left["best"] is None:  # was being written, by a rank 0 that was lost
        assert any(loss.split()[1] == "0" for loss in losses.split(";"))
        expected["best"] = None
    see_same(expected, left, f"{script}\n{found.stderr}")
    print(f"same: {script}\n{found.stderr}")


WIDE = ("model._target_=resuming_parts.Deep", "model.hidden_features=1200")  # messages of megabytes
OF_WIDE = {
    "strategy=ddp": 3,
    "strategy=ddp strategy.shared_memory=false": 3,
    "strategy=ddp_exact strategy.shards=4": 2,
    "strategy=fsdp strategy.wrap=[1,3] strategy.replicas=2": 4,
    "strategy=fsdp strategy.wrap=[1,2,3] strategy.shards=4": 2,
    "strategy=ddp_pipeline model.split=[2] data.batch_size=512": 4,
}
SECONDS = 20.0  # where a wait of gloo's takes a minute here


@pytest.mark.parametrize("number", range(24))
@pytest.mark.nightly
@pytest.mark.spawn
def test_a_rank_that_dies_at_any_instant_holds_nobody_up(number: int, tmp_path: Path, python: str) -> None:
    random = Random(f"{SEED} {number} instants")
    strategy, ranks = random.choice([*OF_WIDE.items()])
    lost = f"{random.randrange(3)} {random.randrange(ranks)} on_step {random.randrange(600)}"
    own = [
        *(
            *QUICK,
            *ALWAYS,
            *WIDE,
            *strategy.split(),
            "data.num_samples=4096",
            "trainer.max_steps=8",
            "checkpoint=none",
            "optimizer.lr=1e-4",
        ),
        *(f"launcher.nproc_per_node={ranks}", "+callbacks.losing._target_=resuming_parts.Losing"),
    ]
    whole = ended(python, tmp_path / "whole", *own)
    assert whole.returncode == 0, whole.stderr
    more = ["launcher.replace_ranks=2", "checkpoint.in_memory_every_n_steps=1"]
    found = ended(python, tmp_path / "parts", *own, *more, LOSES=lost)
    assert found.returncode == 0, f"{strategy}; {lost}\n{found.stderr}"
    see_same(left_by(tmp_path / "whole/run"), left_by(tmp_path / "parts/run"), f"{strategy}; {lost}\n{found.stderr}")
    seconds = json.loads((tmp_path / "parts/run/summary.json").read_text())["seconds_lost"]
    assert seconds < patience(SECONDS), f"{strategy}; {lost}"
    print(f"{strategy}; {ranks} ranks, lost {lost}: {seconds} s")
