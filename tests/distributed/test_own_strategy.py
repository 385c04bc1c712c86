"""A strategy from outside the package: that of docs/own-strategy.md, by real commands in an otherwise empty folder."""

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.pages import ran, requested, unpack

TINY = ["model=toy", "data=random", "data.num_samples=64", "trainer.max_epochs=2", "logger=none", "launcher.device=cpu"]

pytestmark = pytest.mark.spawn


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the files of the page, and nothing else."""
    unpack("own-strategy.md", tmp_path)
    return tmp_path


def summary(python: str, folder: Path, name: str, *overrides: str) -> dict[str, Any]:
    done = ran(python, folder, *TINY, f"hydra.run.dir={name}", *overrides)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads((folder / name / "summary.json").read_text())
    return found


@pytest.mark.slow
def test_local_sgd_that_averages_each_step_is_ddp(folder: Path, python: str) -> None:
    each = ["launcher.nproc_per_node=2", "optimizer.momentum=0"]
    local = summary(python, folder, "local", "strategy=local_sgd", "strategy.every=1", *each)
    ddp = summary(python, folder, "ddp", "strategy=ddp", *each)
    assert (local["strategy"], local["world_size"]) == ("local_sgd", 2)
    assert local["metrics"]["val/loss"] == pytest.approx(ddp["metrics"]["val/loss"], rel=1e-5)


@pytest.mark.slow
def test_local_sgd_averages_every_few_steps(folder: Path, python: str) -> None:
    rarely = summary(python, folder, "rarely", "strategy=local_sgd", "strategy.every=100", "launcher.nproc_per_node=2")
    often = summary(python, folder, "often", "strategy=local_sgd", "strategy.every=1", "launcher.nproc_per_node=2")
    assert rarely["weights_sha256"] != often["weights_sha256"]


OWN = "strategy=local_sgd"
SINGLE = "strategy=single"
TWO = "launcher.nproc_per_node=2"
REFUSED = {
    "value out of range": ([OWN, "strategy.every=0"], "strategy.every=0 is not allowed. Allowed: a whole number at"),
    "misspelt key": (
        [OWN, "+strategy.evry=4"],
        "strategy.evry is not a key. Keys of strategy: every, processes. Did you mean 'every'?",
    ),
    "class that is not there": (
        [OWN, "strategy._target_=local_sgd.Sum"],
        "strategy._target_=local_sgd.Sum cannot be found: local_sgd has no Sum.",
    ),
    "class that lacks methods": (
        [OWN, "strategy._target_=local_sgd.Half"],
        "strategy._target_=local_sgd.Half lacks divisor, norm, optimizer_state, reduce, shard, sync_buffers, "
        "training_step, wrap, which each strategy has.",
    ),
    "other processes": ([OWN, "+strategy.processes=3", TWO], "strategy.processes=3, but 2 process(es) are to run."),
    "single in several processes": ([SINGLE, "strategy.processes=null", TWO], "process"),
    "single in several processes, one set": ([SINGLE, "strategy.processes=1", TWO], "process"),
    "single in several processes, two set": ([SINGLE, "strategy.processes=2", TWO], "process"),
}


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory, python: str) -> dict[str, tuple[int, str]]:
    """Return how each request ended."""
    folder = tmp_path_factory.mktemp("refused")
    unpack("own-strategy.md", folder)
    with (folder / "local_sgd.py").open("a") as module:
        module.write("\n\nclass Half(Group):\n    pass\n\n\nHalfSettings = LocalSGDSettings\n")
    return requested(python, folder, {case: [*TINY, *overrides] for case, (overrides, _) in REFUSED.items()})


@pytest.mark.parametrize("case", REFUSED)
def test_own_strategy_and_single_refuse_by_name(case: str, refused: dict[str, tuple[int, str]]) -> None:
    code, err = refused[case]
    assert (code, err.count("Traceback")) == (2, 0)
    assert REFUSED[case][1] in err
