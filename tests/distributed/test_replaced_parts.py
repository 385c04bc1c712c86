"""A rank that held a part of the model is replaced in place, where another rank has that part, also after a resume."""

import json
import os
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from helpers.marks import slow_but
from helpers.patience import patience

# Layers of which one kills its process, once, in a pass of some ranks: forward, or as backward begins.
MODEL = """
import os
import signal
from pathlib import Path

import torch
from torch import nn


class Layer(nn.Linear):
    def __init__(self, ranks, at, backward, sizes):
        super().__init__(*sizes)
        self.dies, self.at, self.backward, self.passes = int(os.environ["RANK"]) in ranks, at, backward, 0

    def forward(self, inputs):
        self.passes += self.training
        dies = self.passes == self.at and self.dies and not mark().exists()
        if dies and not self.backward:
            die()
        outputs = super().forward(inputs)
        if dies:
            outputs.register_hook(die)
        return outputs


def mark():
    return Path("died_" + os.environ["RANK"])


def die(*_):
    mark().touch()
    os.kill(os.getpid(), signal.SIGKILL)


class Layers(nn.Sequential):
    def __init__(self, ranks, at=15, backward=False):
        shapes = [(10, 96), (96, 96), (96, 96), (96, 5)]  # some without memory until they are dealt
        super().__init__(*[layer for each in shapes for layer in (Layer(ranks, at, backward, each), nn.Tanh())][:-1])


class Averaging(Layers):
    def __init__(self, ranks, at=15, backward=False):
        super().__init__(ranks, at, backward)
        self.mean = nn.Parameter(torch.zeros(5), requires_grad=False)

    def forward(self, inputs):
        if self.training:
            self.mean.data.lerp_(torch.ones(5), 0.1)
        return super().forward(inputs) - self.mean
"""
COMMON = [
    *("data=random", "data.num_samples=80", "data.global_batch_size=16", "data.val_samples=21"),
    *("~model.in_features", "~model.out_features", "~model.hidden_features", "model._target_=dying.Layers"),
    *("optimizer=adamw", "scheduler=cosine", "trainer.max_epochs=3", "trainer.log_every_n_steps=1"),
    *("trainer.gradient_clip_val=0.5", "trainer.progress=false", "logger=none", "launcher.device=cpu"),
    "checkpoint.every_n_steps=4",
]
STRATEGIES = {
    "ddp": ["strategy=ddp"],
    "ddp with averages": ["strategy=ddp", "model._target_=dying.Averaging"],
    "ddp_exact": ["strategy=ddp_exact", "strategy.shards=4"],
    "parameter server": ["strategy=parameter_server"],
    "pipeline": ["strategy=ddp_pipeline", "strategy.micro_batches=2"],
    "fsdp": ["strategy=fsdp", "strategy.replicas=2"],
    "fsdp with ends": ["strategy=fsdp", "strategy.replicas=2", "strategy.wrap=['2','4']"],
    "fsdp with shards": ["strategy=fsdp", "strategy.replicas=2", "strategy.shards=4"],
}


def train(python: str, folder: Path, name: str, ranks: int, *overrides: str) -> tuple[dict[str, Any], str]:
    """Train in a folder; return the summary and what was printed of errors."""
    folder.mkdir(exist_ok=True)
    (folder / "dying.py").write_text(MODEL)
    own = [*COMMON, *STRATEGIES[name], f"launcher.nproc_per_node={ranks}", "hydra.run.dir=run", *overrides]
    own.append(f"launcher.timeout_s={round(patience(60))}")
    ended = subprocess.run(
        [python, "-m", "ddp_recipes", *own],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=patience(180),
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads((folder / "run" / "summary.json").read_text()), ended.stderr


@pytest.fixture(scope="module")
def undisturbed(python: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], dict[str, Any]]:
    """Return the summary of an undisturbed run by strategy and number of ranks."""

    @cache
    def whole(name: str, ranks: int) -> dict[str, Any]:
        return train(python, tmp_path_factory.mktemp("whole") / "run", name, ranks, "+model.ranks=[]")[0]

    return whole


@pytest.mark.parametrize(
    ("name", "ranks", "lost", "replaced"),
    slow_but(
        [],
        [
            ("pipeline", 4, [0], 1),
            ("pipeline", 4, [3], 1),
            ("pipeline", 4, [0, 3], 2),  # of each replica a rank, and of each stage
            ("pipeline", 4, [0, 2], 0),  # all that have the first stage
            ("pipeline", 2, [1], 0),  # the only replica
            ("fsdp", 4, [0], 1),
            ("fsdp", 4, [3], 1),
            ("fsdp", 4, [1, 3], 0),  # all that have the second half of the rows
            ("fsdp with shards", 4, [2], 1),
        ],
        daily=[
            ("pipeline", 4, [0, 3], 2),
            ("fsdp with shards", 4, [2], 1),
        ],
    ),
)
def test_a_part_comes_from_a_rank_that_has_it_or_from_the_checkpoint(
    name: str,
    ranks: int,
    lost: list[int],
    replaced: int,
    python: str,
    undisturbed: Callable[[str, int], dict[str, Any]],
    tmp_path: Path,
) -> None:
    whole = undisturbed(name, ranks)
    own = [f"+model.ranks={lost}".replace(" ", ""), "launcher.replace_ranks=2"]
    summary, errors = train(python, tmp_path / "hurt", name, ranks, *own)
    assert all((tmp_path / "hurt" / f"died_{rank}").exists() for rank in lost)
    assert summary["ranks_replaced"] == replaced, errors
    again = "No rank has all that the lost one had: all start again, from the last checkpoint."
    assert (again in errors) == (replaced == 0)
    see_same(summary, whole)


def see_same(summary: dict[str, Any], whole: dict[str, Any]) -> None:
    for fact in ("weights_sha256", "global_step", "samples_seen"):
        assert summary[fact] == whole[fact]
    for metric in ("val/loss", "train/loss", "train/grad_norm"):
        assert summary["metrics"][metric] == whole["metrics"][metric]


@pytest.mark.parametrize(
    ("name", "ranks", "lost", "replaced"),
    slow_but(
        [],
        [
            ("pipeline", 4, [3], 1),
            ("pipeline", 4, [0], 1),
            ("pipeline", 2, [1], 0),
            ("ddp", 2, [0], 1),
            ("ddp_exact", 2, [1], 1),
            ("fsdp", 4, [0], 1),
            ("fsdp with shards", 4, [3], 1),
            ("parameter server", 3, [2], 0),
        ],
        daily=[("pipeline", 4, [3], 1), ("parameter server", 3, [2], 0)],
    ),
)
def test_a_resumed_run_loses_a_rank_and_ends_with_the_same_bits(
    name: str,
    ranks: int,
    lost: list[int],
    replaced: int,
    python: str,
    undisturbed: Callable[[str, int], dict[str, Any]],
    tmp_path: Path,
) -> None:
    """It stops after step 6, has saved that, and loses a rank in step 8 or 9: before the next checkpoint."""
    schedule = "scheduler.T_max=15"
    train(python, tmp_path / "hurt", name, ranks, "+model.ranks=[]", "trainer.max_steps=6", schedule)
    own = [f"+model.ranks={lost}".replace(" ", ""), "+model.at=5", "launcher.replace_ranks=2", "ckpt_path=auto"]
    summary, errors = train(python, tmp_path / "hurt", name, ranks, *own, schedule)
    assert all((tmp_path / "hurt" / f"died_{rank}").exists() for rank in lost)
    assert summary["ranks_replaced"] == replaced, errors
    see_same(summary, undisturbed(name, ranks))


@pytest.mark.parametrize(
    ("name", "ranks"),
    slow_but(
        [],
        [
            ("ddp", 2),
            ("ddp with averages", 2),
            ("ddp_exact", 2),
            ("fsdp", 4),
            ("fsdp with ends", 4),
            ("fsdp with shards", 4),
            ("pipeline", 4),
        ],
        daily=[("fsdp with ends", 4), ("ddp with averages", 2)],
    ),
)
def test_what_a_backward_pass_had_come_to_does_not_count(
    name: str, ranks: int, python: str, undisturbed: Callable[[str, int], dict[str, Any]], tmp_path: Path
) -> None:
    """The others have gradients of the last layer by then, and averages, of a step that is done again."""
    own = ["+model.ranks=[1]", "+model.backward=true", "launcher.replace_ranks=2"]
    summary, errors = train(python, tmp_path / "hurt", name, ranks, *own)
    assert (tmp_path / "hurt" / "died_1").exists()
    assert summary["ranks_replaced"] == 1, errors
    see_same(summary, undisturbed(name, ranks))
