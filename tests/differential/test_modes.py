"""What is learned, evaluated and predicted with by other ranks: the numbers of the run's own validation."""

import os
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
import torch
from differential import recipes, test_streams
from differential.recipes import ended, left_by

from helpers.processes import summary
from helpers.recipes import QUICK

pytest.importorskip("pyarrow")
pytestmark = [pytest.mark.slow, pytest.mark.spawn]

SEED = int(os.environ.get("DDP_RECIPES_TEST_SEED", "23"))  # the same every day; others by night, by hand
FEW, MANY = 2, 80
NUMBERS = [*range(FEW), *(pytest.param(number, marks=pytest.mark.nightly) for number in range(FEW, MANY))]
EVALUATED = (
    "strategy=single",
    "strategy=ddp",
    "strategy=ddp_exact strategy.shards=12",
    "strategy=fsdp strategy.wrap=1",
)
CHANGED = ("strategy", "model.split", "+model.split", "checkpoint.", "+strategy")  # keys that are another run's own


def check(python: str, folder: Path, own: Sequence[str], ranks: int, random: Random) -> None:
    """Train, and fail unless other runs measure of the last checkpoint what this one did in the end."""
    trained = ended(python, folder / "fit", *own, f"launcher.nproc_per_node={ranks}", "logger=csv")
    script = f"{' '.join(own)} x {ranks}"
    if trained.returncode:
        return print("refused:", script, trained.stderr[-300:])
    left = left_by(folder / "fit/run")
    end = summary(folder / "fit/run")["global_step"]
    last = [row for row in left["rows"] if int(row["step"]) == end and "val/loss" in row]
    if "trainer.overfit_batches=2" in own:  # while it trains, validation is of what is trained on
        last = []
    strategy = random.choice(EVALUATED)
    more = [f"ckpt_path={folder / 'fit/run'}", *strategy.split(), "logger=csv"]
    more.append(f"launcher.nproc_per_node={1 if 'single' in strategy else random.choice((1, 2, 3))}")
    kept = [each for each in own if not each.startswith(CHANGED)]
    script = f"{script}; {' '.join(more)}"
    measured = ended(python, folder / "validate", *kept, *more, "mode=validate")
    if measured.returncode == 2:
        return print("refused:", script, measured.stderr[-300:])
    assert measured.returncode == 0, f"{script}\n{measured.stderr}"
    found = left_by(folder / "validate/run")["metrics"]
    rounded = "16-" in script or "param_dtype=" in script  # of trainer.precision, of what fsdp gathers
    near = {"rel": 2e-2, "abs": 2e-2} if rounded else {"rel": 1e-4, "abs": 1e-5}
    for row in last:
        for name, value in found.items():
            assert float(row[name]) == pytest.approx(value, **near), f"{script}\n{name}"
    alone = [more[0], "strategy=single", "launcher.nproc_per_node=1"]
    outputs = []
    for name, keys in (("several", more), ("alone", alone)):
        predicted = ended(python, folder / name, *kept, *keys, "mode=predict")
        if predicted.returncode == 2:
            return print("same, without predictions:", script, predicted.stderr[-300:])
        assert predicted.returncode == 0, f"{script}\n{predicted.stderr}"
        outputs.append(torch.load(folder / name / "run/predictions.pt", weights_only=True))
    torch.testing.assert_close(*outputs, rtol=near["rel"], atol=near["abs"], msg=lambda text: f"{script}\n{text}")
    print("same:" if last else "same predictions:", script)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_recipe_is_measured_as_it_was(number: int, tmp_path: Path, python: str) -> None:
    random = Random(f"{SEED} {number} recipe")
    overrides, ranks, _ = recipes.drawn(random)
    check(python, tmp_path, [*QUICK, *recipes.ALWAYS, *overrides], ranks, random)


@pytest.mark.nightly
@pytest.mark.parametrize("number", range(MANY))
def test_any_data_are(number: int, tmp_path: Path, python: str) -> None:
    random, kinds = Random(f"{SEED} {number} data"), test_streams.available()
    case = test_streams.drawn(random, tmp_path, kinds[number % len(kinds)])
    check(python, tmp_path, test_streams.overrides_of(case, tmp_path), case.ranks, random)
