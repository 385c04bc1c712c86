"""Dry runs, checks, tuning, profiling and the like, with recipes, data and Lightning modules drawn at random.

Each is done or refused by name: a tool that meets what it does not know ends with a message, never with a traceback.
"""

import os
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from random import Random

import pytest
from differential import recipes, test_streams
from differential.recipes import ended

from helpers.recipes import QUICK

pytest.importorskip("pyarrow")
pytestmark = [pytest.mark.slow, pytest.mark.spawn]

SEED = int(os.environ.get("DDP_RECIPES_TEST_SEED", "31"))  # the same every day; others by night, by hand
FEW, MANY = 1, 60
TOOLS = (
    "plan=true",
    "check=equivalence check_steps=2",
    "tune=lr tune_steps=20",
    "tune=batch_size tune_steps=1",
    "trainer.fast_dev_run=true",
    "trainer.overfit_batches=2",
    "debug=profiler",
)
FOUND = (  # what tools find out, and what a run with the same recipe says as well
    "The loss falls at no learning rate",
    "does not do what strategy=single does",
    "calls its closure more than once in a step",  # and tune=batch_size tries several passes a step
    *recipes.REFUSED,
)
PARTS = Path(__file__).parent.parent / "distributed" / "lightning_parts.py"
MODULES = sorted({"own_parts.Lit", *re.findall(r"^class (\w+)\(Lit\)", PARTS.read_text(), re.MULTILINE)} - {"InTime"})
OF_MODULES = (
    "strategy=ddp",
    "strategy=ddp_exact strategy.shards=4",
    "strategy=fsdp strategy.wrap=[net1,net2]",
    "strategy=fsdp strategy.wrap=[net1,net2] strategy.shards=4",
    "strategy=ddp_pipeline model.split=[net2]",
)


def numbers() -> list[object]:
    return [*range(FEW), *(pytest.param(number, marks=pytest.mark.nightly) for number in range(FEW, MANY))]


def check(python: str, folder: Path, own: Sequence[str], ranks: int, random: Random) -> None:
    """Train, and if that is possible use two tools with the same recipe."""
    own = [*own, f"launcher.nproc_per_node={ranks}"]
    trained = ended(python, folder / "fit", *own)
    if trained.returncode:
        return print("refused:", *own, trained.stderr[-300:])
    for number, tool in enumerate(random.sample(TOOLS, 2)):
        used = ended(python, folder / f"tool_{number}", *own, *tool.split())
        script = f"{' '.join(own)} {tool}\n{used.stderr[-3000:]}"
        assert used.returncode in (0, 2) or any(text in used.stderr for text in FOUND), script
        assert "Traceback" not in used.stderr, script
        print("done:" if used.returncode == 0 else "refused:", script)


@pytest.mark.parametrize("number", numbers())
def test_tools_take_a_recipe_or_refuse_it(number: int, tmp_path: Path, python: str) -> None:
    random = Random(f"{SEED} {number} recipe")
    overrides, ranks, _ = recipes.drawn(random)
    check(python, tmp_path, [*QUICK, *recipes.ALWAYS, *overrides], ranks, random)


@pytest.mark.parametrize("number", numbers())
def test_tools_take_any_data_or_refuse_them(number: int, tmp_path: Path, python: str) -> None:
    random, kinds = Random(f"{SEED} {number} data"), test_streams.available()
    case = test_streams.drawn(random, tmp_path, kinds[number % len(kinds)])
    check(python, tmp_path, test_streams.overrides_of(case, tmp_path), case.ranks, random)


@pytest.mark.skipif(find_spec("lightning") is None, reason="needs the package lightning, of the extra peers")
@pytest.mark.parametrize("number", numbers())
def test_tools_take_a_lightning_module_or_refuse_it(number: int, tmp_path: Path, python: str) -> None:
    random = Random(f"{SEED} {number} module")
    name = random.choice(MODULES)
    module = f"model._target_={name if '.' in name else f'lightning_parts.{name}'}"
    own = [*QUICK, module, "task=lightning", *random.choice(OF_MODULES).split()]
    check(python, tmp_path, own, 2, random)
