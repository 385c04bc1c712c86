"""Recipes, Lightning modules and data at random on a simulated accelerator: what they come to on the CPU."""

import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from random import Random

import pytest
import torch
from differential import recipes, test_lightning, test_streams
from differential.recipes import ended, left_by
from differential.test_lightning import own_parts
from differential.test_lightning_resuming import series

from helpers.accelerator import DEVICE, HABITS, MISSING
from helpers.processes import summary
from helpers.recipes import QUICK
from helpers.warm import warm_python

pytest.importorskip("pyarrow")
pytestmark = [
    *test_lightning.pytestmark,
    pytest.mark.usefixtures(own_parts.__name__),
    pytest.mark.slow,
    pytest.mark.spawn,
]

SEED = int(os.environ.get("DDP_RECIPES_TEST_SEED", "19"))  # the same every day; others by night, by hand
FEW, MANY = 1, 60
CPU = "launcher.device=cpu"
NEAR = {"rel": 1e-3, "abs": 1e-4}
NUMBERS = [*range(FEW), *(pytest.param(number, marks=pytest.mark.nightly) for number in range(FEW, MANY))]


@pytest.fixture(scope="module")
def pythons() -> Iterator[dict[str, str]]:
    """Programs like ``python``, that have loaded Lightning: one without, one with four simulated devices."""
    if find_spec("torch_openreg") is None:
        pytest.skip(MISSING)
    with warm_python("lightning") as cpu, warm_python("lightning", OPENREG="1", OPENREG_DEVICES="4") as devices:
        yield {CPU: cpu, DEVICE: devices}


def see_near(cpu: Path, device: Path, script: str) -> None:
    """Fail unless two runs have left the same, but for the rounding of other kernels: optimizers choose by device."""
    left = {each: left_by(each) for each in (cpu, device)}
    for key in ("samples_seen", "status"):
        assert left[device].get(key) == left[cpu].get(key), f"{script}\n{key}"
    expected, found = series(left[cpu]), series(left[device])
    assert found.keys() == expected.keys(), f"{script}\n{found.keys() ^ expected.keys()}"
    for name, points in expected.items():
        steps, values = zip(*points, strict=True)
        assert [step for step, _ in found[name]] == [*steps], f"{script}\n{name}"
        assert [value for _, value in found[name]] == pytest.approx(values, **NEAR), f"{script}\n{name}"
    one, two = (test_streams.weights(summary(each)) for each in (cpu, device))
    torch.testing.assert_close(two, one, rtol=NEAR["rel"], atol=NEAR["abs"], msg=lambda text: f"{script}\n{text}")


def compare(pythons: dict[str, str], folder: Path, random: Random, overrides_in: Callable[[str], list[str]]) -> None:
    """Run a recipe on both, and fail unless they leave the same, or are both refused.

    Args:
        overrides_in: returns the recipe, given a name for what it writes beside its directory.
    """
    habits = random.choice(["all", "all", *HABITS])
    own = {CPU: "cpu", DEVICE: "device"}
    environ = {DEVICE: {"OPENREG": "1", **HABITS[habits]}}
    found = {
        each: ended(pythons[each], folder / name, *overrides_in(name), each, "logger=csv", **environ.get(each, {}))
        for each, name in own.items()
    }
    script = f"{' '.join(overrides_in('device'))} ({habits})"
    cpu, device = found[CPU], found[DEVICE]
    if "_overrideable not implemented" in device.stderr:
        return print("OpenReg has no such operation:", script)
    if cpu.returncode:
        assert device.returncode == cpu.returncode, f"{script}\n{cpu.stderr}\n{device.stderr}"
        return print("refused:", script, device.stderr[-300:])
    if device.returncode == 2:
        return print("refused on the device:", script, device.stderr[-600:])
    assert device.returncode == 0, f"{script}\n{device.stderr}"
    see_near(folder / "cpu/run", folder / "device/run", f"{script}\n{device.stderr}")
    print("same:", script)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_recipe_leaves_what_it_leaves_on_the_cpu(number: int, pythons: dict[str, str], tmp_path: Path) -> None:
    random = Random(f"{SEED} {number} recipe")
    overrides, ranks, _ = recipes.drawn(random)
    # OpenReg has an autocast that changes nothing, and no running statistics; what is summed in shared memory is summed
    # in another order.
    kept = [each for each in overrides if "precision" not in each and "norm=batch" not in each]
    shared = ["strategy.shared_memory=false"] if "strategy=ddp" in kept else []
    own = [*QUICK, *recipes.ALWAYS, *kept, *shared, f"launcher.nproc_per_node={ranks}"]
    compare(pythons, tmp_path, random, lambda _: own)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_lightning_module_does(number: int, pythons: dict[str, str], tmp_path: Path) -> None:
    random = Random(f"{SEED} {number} module")
    case, ranks = test_lightning.drawn(random), random.choice((1, 2))
    if any(each.startswith(("net.batch_norm", "net.conv")) for each in case.split("+")):
        return print("OpenReg has no such operation:", case)

    def overrides_in(name: str) -> list[str]:
        more = [f"launcher.nproc_per_node={ranks}", "strategy.shared_memory=false"]
        return [*test_lightning.overrides_of(case, tmp_path / f"{name}.pt"), *more]

    compare(pythons, tmp_path, random, overrides_in)


@pytest.mark.parametrize("number", NUMBERS)
def test_any_data_do(number: int, pythons: dict[str, str], tmp_path: Path) -> None:
    random, kinds = Random(f"{SEED} {number} data"), test_streams.available()
    case = test_streams.drawn(random, tmp_path, kinds[number % len(kinds)])
    shared = ["strategy.shared_memory=false"] if case.strategy == ("strategy=ddp",) else []

    def overrides_in(name: str) -> list[str]:
        (folder := tmp_path / f"seen_{name}").mkdir(exist_ok=True)
        return [*test_streams.overrides_of(case, folder), *shared, f"launcher.nproc_per_node={case.ranks}"]

    compare(pythons, tmp_path, random, overrides_in)
