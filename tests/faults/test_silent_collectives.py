"""Collectives that raise nothing when a rank is lost, as NCCL's do, on real processes without a GPU.

A strategy imitates them over gloo: where gloo raises, it waits until it is aborted, and then goes on with garbage.
"""

import csv
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from helpers.patience import patience

PARTS = """
import os
from pathlib import Path
from signal import SIGKILL, SIGSTOP
from threading import Event, current_thread, main_thread

import torch
import torch.distributed as dist

from ddp_recipes import Callback
from ddp_recipes.strategies import DDPExact, DDPExactSettings

class SilentSettings(DDPExactSettings):
    pass


class FirstTimesOutSettings(DDPExactSettings):
    pass


class Silent(DDPExact):
    silent_ranks = (0, 1, 2)

    def setup(self, *arguments):
        super().setup(*arguments)
        self.silent, self.aborted = True, Event()

    def wrap(self, task, devices):
        self.task = task
        return super().wrap(task, devices)

    def abort(self):
        if current_thread() is not main_thread():
            Path(f"aborted_{self.world.rank}").touch()
        self.aborted.set()

    def garbage(self, collective, left):
        try:
            return collective()
        except dist.DistBackendError:
            raise
        except RuntimeError:
            if self.world.rank not in self.silent_ranks:
                raise
            assert self.aborted.wait(60)
            return left()

    def reduce(self):
        self.garbage(super().reduce, self.spoil)

    def spoil(self):
        Path(f"spoilt_{self.world.rank}").touch()
        for parameter in self.task.parameters():
            parameter.grad = torch.full_like(parameter, 1e3)

    def sum(self, values):
        return self.garbage(lambda: super(Silent, self).sum(values), lambda: values.sum(dim=0).fill_(7))


class FirstTimesOut(Silent):
    silent_ranks = (1, 2)


class Disturbing(Callback):
    def __init__(self, rank, at, how, where="on_step"):
        self.at, self.how = at, how
        if rank == int(os.environ["RANK"]):
            setattr(self, where, self.disturb)

    def disturb(self, step):
        if step == self.at and not Path("done").exists():
            Path("done").touch()
            os.kill(os.getpid(), SIGSTOP if self.how == "stop" else SIGKILL)
"""
RECIPE = [
    "strategy=ddp_exact",
    "data=random",
    "data.num_samples=96",
    "data.val_samples=21",
    "data.global_batch_size=12",
    "optimizer.momentum=0.9",
    "trainer.max_epochs=2",
    "trainer.log_every_n_steps=4",
    "trainer.progress=false",
    "logger=csv",
    "launcher.device=cpu",
    "launcher.nproc_per_node=3",
    "launcher.replace_ranks=2",
    "hydra.run.dir=run",
]


def ran(python: str, folder: Path, *overrides: str) -> dict[str, Any]:
    """Return the summary of a run, and the points that it logged."""
    folder.mkdir(exist_ok=True)
    (folder / "parts.py").write_text(PARTS)
    ended = subprocess.run(
        [python, "-m", "ddp_recipes", *RECIPE, *overrides],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=patience(180),
    )
    assert ended.returncode == 0, ended.stderr
    assert "start again" not in ended.stderr
    found: dict[str, Any] = json.loads((folder / "run" / "summary.json").read_text())
    rows = csv.DictReader((folder / "run" / "csv" / "metrics.csv").read_text().splitlines())
    return found | {"points": [{name: row[name] for name in row if "second" not in name} for row in rows]}


def disturbed(rank: int, at: int, how: str) -> str:
    """Return the override with which a rank does something to itself after a step."""
    return f"+callbacks.disturbing={{_target_: parts.Disturbing, rank: {rank}, at: {at}, how: {how}}}"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, python: str) -> dict[str, Any]:
    """Return the summary of a run to which nothing was done."""
    return ran(python, tmp_path_factory.mktemp("undisturbed"))


def see_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Fail unless one rank was replaced, and nobody can tell from what came out."""
    assert ours["ranks_replaced"] == 1
    for name in ("weights_sha256", "global_step", "samples_seen"):
        assert ours[name] == theirs[name], name
    assert ours["points"] == theirs["points"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("at", "where"),
    [
        (5, "on_step"),
        pytest.param(8, "on_step", marks=pytest.mark.slow),
        pytest.param(8, "on_validation_end", marks=pytest.mark.slow),
    ],
    ids=["in a step", "in a validation", "before ranks agree to go on"],
)
def test_what_was_aborted_is_not_used(
    at: int, where: str, tmp_path: Path, undisturbed: dict[str, Any], python: str
) -> None:
    where = f"+callbacks.disturbing.where={where}"
    target = ["strategy._target_=parts.Silent", "checkpoint=none"]
    summary = ran(python, tmp_path, *target, disturbed(1, at, "kill"), where)
    see_same(summary, undisturbed)
    assert {path.name for path in tmp_path.glob("aborted_*")} == {"aborted_0", "aborted_2"}
    if at == 5:
        assert {path.name for path in tmp_path.glob("spoilt_*")} == {"spoilt_0", "spoilt_2"}


@pytest.mark.slow
def test_a_rank_that_times_out_frees_the_others_but_the_one_that_hangs(
    tmp_path: Path, undisturbed: dict[str, Any], python: str
) -> None:
    target = "strategy._target_=parts.FirstTimesOut"
    summary = ran(python, tmp_path, target, "launcher.timeout_s=5", disturbed(2, 5, "stop"))
    see_same(summary, undisturbed)
    assert (tmp_path / "aborted_1").exists()
