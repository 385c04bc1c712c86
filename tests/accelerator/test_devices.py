"""What differs between devices is left as it was found, and drawn from alike, on a simulated accelerator."""

import os
import subprocess

import pytest

from helpers.accelerator import Accelerator
from helpers.patience import patience


def printed(accelerator: Accelerator, code: str) -> list[str]:
    ended = subprocess.run(
        [accelerator.python, "-c", code],
        cwd=accelerator.folder,
        env={**os.environ, "OPENREG": "1"},
        capture_output=True,
        text=True,
        timeout=patience(60),
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


FRACTION = """
import torch
from ddp_recipes.devices import memory_limited

# As plug-ins of torch's have it: OpenReg has none.
limits = [0.5]
torch.openreg.set_per_process_memory_fraction = lambda fraction, device: limits.append(fraction)
torch.openreg.get_per_process_memory_fraction = lambda device: limits[-1]
for fraction in (0.9, 0.3):
    with memory_limited(torch.device("openreg", 0), fraction):
        print(limits[-1])
    print(limits[-1])
"""
DRAWN = """
import torch
from ddp_recipes.runtime.seeding import Generators
from ddp_recipes.strategies.dp.settings import DataParallelSettings
from ddp_recipes.strategies.dp.strategy import DataParallel

strategy = DataParallel(DataParallelSettings())
generators = Generators(1, strategy.draws_on([torch.device("openreg", 0)]), 0, drawn=False)
for _ in range(2):
    generators.begin(3, 0)
    print([torch.rand(1, device=f"openreg:{number}").item() for number in range(4)])
"""
KEPT = """
import torch
from ddp_recipes.devices import all_of, random_kept, seed

devices = [torch.device("cpu"), *all_of("openreg")]


def states():
    return [torch.get_rng_state(), *(torch.openreg.get_rng_state(device) for device in devices[1:])]


def same(states, others):
    print(*(torch.equal(state, other) for state, other in zip(states, others, strict=True)))


before = states()
with random_kept(devices):
    torch.rand(3)
    for number, device in enumerate(devices[1:]):
        seed(device, number + 7)  # the simulated device draws from the CPU's generator, and has only seeds of its own
    same(before, states())
same(before, states())
"""


@pytest.mark.slow
def test_generators_of_all_devices_are_left_as_they_were(accelerator: Accelerator) -> None:
    assert printed(accelerator, KEPT) == [" ".join(["False"] * 5), " ".join(["True"] * 5)]


@pytest.mark.slow
def test_a_limit_of_memory_is_put_back_to_what_it_was(accelerator: Accelerator) -> None:
    assert printed(accelerator, FRACTION) == ["0.5", "0.5", "0.3", "0.5"]


@pytest.mark.slow
def test_a_step_of_dp_draws_the_same_on_all_its_devices_again(accelerator: Accelerator) -> None:
    first, second = printed(accelerator, DRAWN)
    assert first == second


@pytest.mark.slow
def test_dp_is_refused_where_torch_cannot_deal_a_batch(accelerator: Accelerator) -> None:
    ended = accelerator.run("strategy=dp")
    assert ended.status == 2, ended.err
    assert "DataParallel, which deals batches to GPUs alone, and this run is on openreg" in ended.err
