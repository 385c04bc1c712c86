"""Restarts: of all ranks by the local launcher, of all workers by torchrun; and ranks that never come."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from ddp_recipes.reporting.run_directory import Summary
from helpers.patience import patience

pytestmark = [pytest.mark.slow, pytest.mark.spawn]

# One linear layer that ends its process at a step of rank 1: once, or whenever it gets there. And a callback that has
# the run told to stop, and fails as that saves.
MODEL = """
import os
import signal
from pathlib import Path

from ddp_recipes import Callback
from torch import nn


class Stopping(Callback):
    def on_step(self, step):
        if step == 5 and os.environ["RANK"] == "1":
            os.kill(os.getppid(), signal.SIGTERM)

    def on_save_start(self, step):
        if step > 5 and os.environ["RANK"] == "1":
            raise ValueError("the cat sat on the keyboard")


class Ending(Callback):
    def on_step(self, step):
        self.stop |= step == 7

    def on_end(self):
        died = Path("died")
        if self.stop and os.environ["RANK"] == "1" and not died.exists():
            died.touch()
            os._exit(3)


class Dying(nn.Linear):
    def __init__(self, at: int, once: bool) -> None:
        super().__init__(10, 5)
        self.at, self.once, self.steps = at, once, 0

    def forward(self, inputs):
        self.steps += self.training
        died = Path("died")
        if self.training and self.steps == self.at and os.environ["RANK"] == "1" and not (self.once and died.exists()):
            died.touch()
            os._exit(3)
        return super().forward(inputs)
"""
STEPS = 40
OVERRIDES = [
    "data=random",
    "data.num_samples=64",
    "data.global_batch_size=16",
    "~model.in_features",
    "~model.out_features",
    "~model.hidden_features",
    "model._target_=dying.Dying",
    f"trainer.max_steps={STEPS}",
    "trainer.max_epochs=-1",
    "trainer.progress=false",
    "logger=none",
    "launcher.device=cpu",
    "checkpoint.every_n_steps=4",
    "checkpoint.save_top_k=-1",
]


def call(python: str, folder: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    (folder / "dying.py").write_text(MODEL)
    return subprocess.run(
        [python, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), **environ},
        capture_output=True,
        text=True,
        timeout=patience(180),
    )


def local(python: str, folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return call(python, folder, "-m", "ddp_recipes", *OVERRIDES, "launcher.nproc_per_node=2", *overrides)


def summary(directory: Path) -> Summary:
    values: Summary = json.loads((directory / "summary.json").read_text())
    return values


def test_all_ranks_start_again_from_the_last_checkpoint_and_end_as_if_undisturbed(tmp_path: Path, python: str) -> None:
    hurt = local(python, tmp_path, "+model.at=30", "+model.once=true", "launcher.max_restarts=1", "hydra.run.dir=hurt")
    assert hurt.returncode == 0, hurt.stderr
    assert "Restart 1 of 1" in hurt.stderr
    # A restarted rank counts its steps anew, so it passes step 30 of the run without reaching its own 30th.
    whole = local(python, tmp_path, "+model.at=1000", "+model.once=true", "hydra.run.dir=whole")
    assert whole.returncode == 0, whole.stderr
    assert summary(tmp_path / "hurt")["weights_sha256"] == summary(tmp_path / "whole")["weights_sha256"]
    assert summary(tmp_path / "hurt")["global_step"] == STEPS


def test_a_run_that_a_callback_has_ended_has_nothing_left_to_do_as_it_starts_again(tmp_path: Path, python: str) -> None:
    calm = ["+model.at=1000", "+model.once=true", "+callbacks.own={_target_: dying.Ending}", "hydra.run.dir=run"]
    ended = local(python, tmp_path, *calm, "launcher.max_restarts=1", "checkpoint.every_n_steps=1")
    assert ended.returncode == 0, ended.stderr
    assert "Restart 1 of 1" in ended.stderr
    assert summary(tmp_path / "run")["global_step"] == 7
    ended = local(python, tmp_path, *calm, "ckpt_path=auto")  # one that goes on by somebody's wish is not over for that
    assert ended.returncode == 0, ended.stderr
    assert summary(tmp_path / "run")["global_step"] == STEPS


def test_it_gives_up_after_max_restarts_and_deletes_nothing(tmp_path: Path, python: str) -> None:
    ended = local(python, tmp_path, "+model.at=10", "+model.once=false", "launcher.max_restarts=2", "hydra.run.dir=run")
    assert ended.returncode == 1
    assert [f"Restart {number} of 2" in ended.stderr for number in (1, 2, 3)] == [True, True, False]
    assert "exited with exit code 3" in ended.stderr
    kept = {path.name for path in (tmp_path / "run" / "checkpoints").glob("step_*.pt")}
    assert {"step_00000004.pt", "step_00000008.pt"} <= kept
    assert summary(tmp_path / "run")["status"] == "failed"


def test_a_run_that_torchrun_restarts_goes_on_in_its_directory(tmp_path: Path, python: str) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=2"]
    ended = call(python, tmp_path, *torchrun, "-m", "ddp_recipes", *OVERRIDES, "+model.at=30", "+model.once=true")
    assert ended.returncode == 0, ended.stderr
    (directory,) = tmp_path.glob("outputs/*/*")
    assert (summary(directory)["status"], summary(directory)["global_step"]) == ("finished", STEPS)
    log = (directory / "train.log").read_text()
    assert [f"step {step}  val/loss" in log for step in (4, STEPS)] == [True, True]  # of both starts, in one log
    assert not list(tmp_path.glob(".torchrun_*"))


def test_a_rank_that_never_arrives_is_named(tmp_path: Path, python: str) -> None:
    alone = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    rest = ["+model.at=1000", "+model.once=true", "launcher.timeout_s=2"]
    ended = call(python, tmp_path, "-m", "ddp_recipes", *OVERRIDES, *rest, **alone, MASTER_PORT="29713")
    assert ended.returncode == 1
    assert "Rank 1 of 2 did not arrive within launcher.timeout_s=2 seconds" in ended.stderr
    assert not (tmp_path / "outputs").exists()


def test_a_run_that_is_to_stop_is_not_started_again_and_says_so(tmp_path: Path, python: str) -> None:
    own = ["+model.at=-1", "+model.once=true", "+callbacks.stopping._target_=dying.Stopping"]
    ended = local(python, tmp_path, *own, "launcher.start_method=spawn", "launcher.max_restarts=3", "hydra.run.dir=run")
    assert ended.returncode == 1, ended.stderr
    assert "the cat sat on the keyboard" in ended.stderr
    assert "Nothing is started again: the run is to stop (SIGTERM)." in ended.stderr
    assert "Restart" not in ended.stderr
