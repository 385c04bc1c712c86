"""Simulated accelerators, NCCL's habits, strategies and ways to end, any two values of which meet in one run."""

import time
from collections.abc import Callable
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import Any

import pytest

from ddp_recipes.reporting.run_directory import Summary
from helpers.accelerator import HABITS, Accelerator, disturbed
from helpers.marks import slow_but
from helpers.pairs import Case, pairwise
from helpers.patience import patience

Run = Callable[..., Summary]

WRAPPED = ["strategy=fsdp", "strategy.wrap=[net1,net2]"]
STRATEGIES = {
    "single": ["strategy=single"],
    "ddp": ["strategy=ddp", "strategy.shared_memory=false"],
    "ddp_exact": ["strategy=ddp_exact"],
    "fsdp": WRAPPED,
    "fsdp, level 1": [*WRAPPED, "strategy.level=1"],
    "fsdp, shards": [*WRAPPED, "strategy.shards=12"],
    "fsdp, replicas": [*WRAPPED, "strategy.replicas=2"],
    "ddp_pipeline": ["strategy=ddp_pipeline"],
}
WAYS = {
    "plain": [],
    "accumulated": ["trainer.accumulate_grad_batches=2"],
    "clipped": ["trainer.gradient_clip_val=0.1"],
    "bf16-mixed": ["trainer.precision=bf16-mixed"],
    "16-mixed": ["trainer.precision=16-mixed"],
    "adamw, saved meanwhile": ["optimizer=adamw", "checkpoint.every_n_steps=3", "checkpoint.async_save=true"],
}
# Devices that a process sees, ranks, devices of a replica.
PLACES = [(1, 1, 1), (2, 1, 1), (2, 1, 2), (2, 2, 1), (4, 1, 2), (4, 2, 1), (4, 2, 2), (4, 3, 1), (4, 4, 1)]
EVENTS = [
    *("finishes", "rank 0 raises", "the last rank raises", "rank 0 is killed", "the last rank is killed"),
    *("is stopped and goes on", "is killed and goes on", "has a rank replaced"),
]
TIMEOUT_S = 60  # of a collective; no end may wait for it
ENDS_S = 25  # to start, two steps, and the end
SEED, AT_NIGHT = 28, range(29, 34)


def possible(case: Case) -> bool:
    """Whether a recipe is not refused, and a group takes its devices."""
    _, ranks, each = case["place"]
    strategy = case["strategy"]
    if strategy == "single":
        return ranks == 1
    if strategy.startswith("fsdp"):
        return each == 1 and (strategy != "fsdp, replicas" or ranks == 4)
    if strategy == "ddp_pipeline":
        return each == 1 and ranks % 2 == 0 and case["way"] != "16-mixed"
    return each == 1 or case["habit"] != "one device a group"


def table(seed: int) -> list[Case]:
    columns = {"strategy": [*STRATEGIES], "place": PLACES, "habit": [*HABITS], "way": [*WAYS], "event": EVENTS}
    return pairwise(columns, seed, possible)


def words(case: Case, seed: int) -> str:
    devices, ranks, each = case["place"]
    return (
        f"{case['strategy']} on {ranks}x{each} of {devices}, {case['habit']}, {case['way']}, {case['event']} ({seed})"
    )


CASES = {words(case, seed): case for seed in (SEED, *AT_NIGHT) for case in table(seed)}
DAILY = [name for name in CASES if name.endswith(f"({SEED})")][::20]


@pytest.fixture(scope="module")
def known() -> dict[Any, str]:
    """Weights of undisturbed runs."""
    return {}


def recipe(case: Case) -> list[str]:
    """Return the overrides that say what is computed."""
    model = "model=toy_mp" if case["place"][2] == 2 else "model=toy"
    return [*STRATEGIES[case["strategy"]], *WAYS[case["way"]], model, "data.num_samples=320"]


def expected(case: Case, known: dict[Any, str], run: Run, accelerator: Accelerator) -> str:
    """Return the weights of the CPU, on which OpenReg's autocast, which changes nothing, is left out."""
    _, ranks, each = case["place"]
    key = case["strategy"], case["way"], ranks, each
    if key not in known:
        overrides = recipe(case)
        if case["way"] == "16-mixed":  # scales a loss of float32 there
            ended = accelerator.run(*overrides, ranks=ranks, name="expected")
            assert ended.status == 0, ended.err
            known[key] = ended.summary["weights_sha256"]
        else:
            exact = [each for each in overrides if "precision" not in each]
            known[key] = run(*exact, world_size=ranks)["weights_sha256"]
    return known[key]


@pytest.mark.parametrize("name", slow_but([], CASES, DAILY))
def test_a_run_ends_as_on_the_cpu(
    name: str, known: dict[Any, str], run: Run, pythons_with_devices: dict[int, str], tmp_path: Path
) -> None:
    case = CASES[name]
    devices, ranks, each = case["place"]
    accelerator = Accelerator(pythons_with_devices[devices], tmp_path)
    habits = HABITS[case["habit"]] | ({"STAGED_ONE_DEVICE": "0"} if each > 1 else {})  # as NCCL's earlier way
    own = [*recipe(case), f"launcher.timeout_s={TIMEOUT_S}", "ckpt_path=auto"]
    event = case["event"]
    rank = 0 if "rank 0" in event else ranks - 1
    how = "raise" if "raises" in event else int(SIGTERM if "stopped" in event else SIGKILL)
    hurt = [] if event == "finishes" else [disturbed(tmp_path, how, rank)]
    replaced = ["launcher.replace_ranks=1"] if "replaced" in event else []
    began = time.monotonic()
    ended = accelerator.run(*own, *hurt, *replaced, ranks=ranks, habits=habits)
    if hurt and how == SIGKILL and ranks == 1 and not replaced:
        assert ended.status == -SIGKILL  # one rank is the command itself
    elif hurt and not replaced:
        assert time.monotonic() - began < patience(ENDS_S)
        assert ended.status == (75 if how == SIGTERM else 1), ended.err
        assert ended.summary["status"] == ("preempted" if how == SIGTERM else "failed")
        if how == "raise":
            assert "ValueError: the cat sat on the keyboard" in ended.err
            assert f"rank {rank}: ValueError: the cat sat on the keyboard" in ended.summary["error"]
        if how == SIGKILL:
            assert f"Rank {rank}" in ended.err
            assert "was killed by SIGKILL" in ended.summary["error"]
    if hurt and not replaced:
        if "goes on" not in event:
            return
        ended = accelerator.run(*own, ranks=ranks, habits=habits)
    assert ended.status == 0, ended.err
    assert (ended.summary["status"], ended.summary["device"]) == ("finished", "OpenReg")
    assert ended.summary["weights_sha256"] == expected(case, known, run, accelerator)
