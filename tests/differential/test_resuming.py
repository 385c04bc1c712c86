"""Recipes drawn from what goes together, stopped at a random step and gone on with: as if nothing had stopped them."""

import os
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from differential.recipes import ALWAYS, REFUSED, drawn, left_by, see_same

from ddp_recipes.errors import RequestError
from ddp_recipes.reporting.run_directory import Summary

Run = Callable[..., Summary]

SEED = int(os.environ.get("DDP_RECIPES_TEST_SEED", "11"))  # the same every day; others by night, by hand
FEW, MANY = 3, 200
STOPPING = [*ALWAYS, "+callbacks.stopping._target_=resuming_parts.Stopping"]


@pytest.fixture(autouse=True)
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put what the recipes name where ranks find it."""
    here = Path(__file__).parent
    for folder in (here, here.parent / "distributed"):
        monkeypatch.syspath_prepend(folder)


def went_on(run: Run, random: Random, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Play a recipe whole, and stopped; return ``same``, or ``refused``."""
    overrides, ranks, other = drawn(random)
    where = random.random(), random.randrange(ranks), random.choice(("raise", "SIGTERM"))
    try:
        run(*STOPPING, *overrides, world_size=ranks, directory=folder / "whole")
    except Exception as error:
        if isinstance(error, RequestError) or any(words in str(error) for words in REFUSED):
            return "refused"
        raise
    whole = left_by(folder / "whole")
    steps = len({row["step"] for row in whole["rows"] if "train/loss" in row})
    stop = 1 + int(where[0] * max(1, steps - 1))
    script = f"{' '.join(overrides)}; {ranks} ranks, {stop} {where[1]} {where[2]}, then {other or ranks}"
    monkeypatch.setenv("STOPS", f"{stop} {where[1]} {where[2]}")
    try:
        run(*STOPPING, *overrides, world_size=ranks, directory=folder / "parts")
        assert where[2] == "SIGTERM", script  # of which ranks tell each other once a second
    except Exception as error:
        if not any(words in str(error) for words in ("stopped here", "Stopped by SIGTERM")):
            raise
        monkeypatch.delenv("STOPS")
        again = ["ckpt_path=auto"] if list((folder / "parts" / "checkpoints").glob("step_*")) else []
        if not again:  # it had come to none
            (folder / "parts" / "config.yaml").unlink()
        run(*STOPPING, *overrides, *again, world_size=other or ranks, directory=folder / "parts")
    see_same(whole, left_by(folder / "parts"), script)
    return "same"


@pytest.mark.parametrize(
    "number", [*range(FEW), *(pytest.param(number, marks=pytest.mark.nightly) for number in range(FEW, MANY))]
)
@pytest.mark.slow
def test_a_stopped_run_goes_on_as_if_it_had_not_been(
    number: int, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    print(went_on(run, Random(f"{SEED} {number}"), tmp_path, monkeypatch))
