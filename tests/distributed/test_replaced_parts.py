"""A rank that held a part of the model is replaced in place, where another rank has that part."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

# Layers of which one kills its process, once, in a pass of a rank.
MODEL = """
import os
import signal
from pathlib import Path

from torch import nn


class Layer(nn.Linear):
    def __init__(self, rank, at, sizes):
        super().__init__(*sizes)
        self.rank, self.at, self.passes = rank, at, 0

    def forward(self, inputs):
        self.passes += self.training
        mark = Path(f"died_{self.rank}")
        if self.passes == self.at and os.environ["RANK"] == str(self.rank) and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(inputs)


class Layers(nn.Sequential):
    def __init__(self, rank, at):
        shapes = [(10, 16), (16, 16), (16, 16), (16, 5)]
        super().__init__(*[layer for each in shapes for layer in (Layer(rank, at, each), nn.Tanh())][:-1])
"""
COMMON = [
    *("data=random", "data.num_samples=80", "data.global_batch_size=16", "data.val_samples=21"),
    *("~model.in_features", "~model.out_features", "~model.hidden_features", "model._target_=dying.Layers"),
    *("optimizer=adamw", "scheduler=cosine", "trainer.max_epochs=3", "trainer.log_every_n_steps=1"),
    *("trainer.gradient_clip_val=0.5", "trainer.progress=false", "logger=none", "launcher.device=cpu"),
    *("checkpoint.every_n_steps=4", "launcher.timeout_s=60"),
]
STRATEGIES = {
    "pipeline": ["strategy=ddp_pipeline", "strategy.micro_batches=2"],
    "fsdp": ["strategy=fsdp", "strategy.replicas=2"],
    "exact": ["strategy=fsdp", "strategy.replicas=2", "strategy.shards=4"],
}


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, str]:
    """Weights by strategy and number of ranks."""
    return {}


def train(python: str, folder: Path, name: str, ranks: int, *overrides: str) -> tuple[dict[str, Any], str]:
    """Train in a folder; return the summary and what was printed of errors."""
    folder.mkdir(exist_ok=True)
    (folder / "dying.py").write_text(MODEL)
    own = [*COMMON, *STRATEGIES[name], f"launcher.nproc_per_node={ranks}", "hydra.run.dir=run", *overrides]
    ended = subprocess.run(
        [python, "-m", "ddp_recipes", *own],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads((folder / "run" / "summary.json").read_text()), ended.stderr


def hurt(python: str, folder: Path, name: str, ranks: int, rank: int, *overrides: str) -> tuple[dict[str, Any], str]:
    """Train, the rank dying once in its 15th pass; see that the weights are those of an undisturbed run."""
    whole, _ = train(python, folder / "whole", name, ranks, "+model.rank=-1", "+model.at=0", *overrides)
    own = [f"+model.rank={rank}", "+model.at=15", "launcher.replace_ranks=1", *overrides]
    summary, errors = train(python, folder / "hurt", name, ranks, *own)
    assert (folder / "hurt" / f"died_{rank}").exists()
    assert summary["weights_sha256"] == whole["weights_sha256"]
    assert summary["global_step"] == whole["global_step"] == 15
    for metric in ("val/loss", "train/loss", "train/grad_norm"):
        assert summary["metrics"][metric] == whole["metrics"][metric]
    return summary, errors


@pytest.mark.parametrize(("name", "rank"), [("pipeline", 3), ("pipeline", 0), ("fsdp", 0), ("fsdp", 3), ("exact", 2)])
def test_another_replica_hands_over_the_part(name: str, rank: int, python: str, tmp_path: Path) -> None:
    summary, errors = hurt(python, tmp_path, name, 4, rank)
    assert summary["ranks_replaced"] == 1, errors
    assert "start again" not in errors


def test_without_another_replica_all_start_again_from_the_checkpoint(python: str, tmp_path: Path) -> None:
    summary, errors = hurt(python, tmp_path, "pipeline", 2, 1)
    assert summary["ranks_replaced"] == 0
    assert "No rank has all that the lost one had: all start again, from the last checkpoint." in errors
