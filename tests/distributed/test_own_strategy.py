"""A strategy from outside the package: that of docs/own-strategy.md, by real commands in an otherwise empty folder."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "own-strategy.md"
FILE = re.compile(r"^```(?:python|yaml)\n# ([\w./]+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TINY = ["model=toy", "data=random", "data.num_samples=64", "trainer.max_epochs=2", "logger=none", "launcher.device=cpu"]

pytestmark = pytest.mark.spawn


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the files of the page, and nothing else."""
    for name, text in FILE.findall(PAGE.read_text(encoding="utf-8")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def ran(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ddp_recipes", "--config-dir=my_conf", *TINY, *overrides]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def summary(folder: Path, name: str, *overrides: str) -> dict[str, Any]:
    done = ran(folder, f"hydra.run.dir={name}", *overrides)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads((folder / name / "summary.json").read_text())
    return found


def test_local_sgd_that_averages_each_step_is_ddp(folder: Path) -> None:
    each = ["launcher.nproc_per_node=2", "optimizer.momentum=0"]
    local = summary(folder, "local", "strategy=local_sgd", "strategy.every=1", *each)
    ddp = summary(folder, "ddp", "strategy=ddp", *each)
    assert (local["strategy"], local["world_size"]) == ("local_sgd", 2)
    assert local["metrics"]["val/loss"] == pytest.approx(ddp["metrics"]["val/loss"], rel=1e-5)


def test_local_sgd_averages_every_few_steps(folder: Path) -> None:
    rarely = summary(folder, "rarely", "strategy=local_sgd", "strategy.every=100", "launcher.nproc_per_node=2")
    often = summary(folder, "often", "strategy=local_sgd", "strategy.every=1", "launcher.nproc_per_node=2")
    assert rarely["weights_sha256"] != often["weights_sha256"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["strategy.every=0"], "strategy.every=0 is not allowed. Allowed: a whole number at least 1."),
        (["+strategy.evry=4"], "strategy.evry is not a key. Keys of strategy: every, processes. Did you mean 'every'?"),
        (["strategy._target_=local_sgd.Sum"], "strategy._target_=local_sgd.Sum cannot be found: local_sgd has no Sum."),
        (["+strategy.processes=3", "launcher.nproc_per_node=2"], "strategy.processes=3, but 2 process(es) are to run."),
    ],
)
def test_own_strategy_refuses_by_name(folder: Path, overrides: list[str], message: str) -> None:
    done = ran(folder, "strategy=local_sgd", *overrides)
    assert (done.returncode, done.stderr.count("Traceback")) == (2, 0)
    assert message in done.stderr


@pytest.mark.parametrize("processes", ["null", "1", "2"])
def test_single_never_trains_in_several_processes(folder: Path, processes: str) -> None:
    done = ran(folder, "strategy=single", f"strategy.processes={processes}", "launcher.nproc_per_node=2")
    assert done.returncode == 2
    assert "process" in done.stderr
