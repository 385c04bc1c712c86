"""What several processes may disagree on or fight over: weights, a directory, a port, the data worker's life."""

import os
import signal
import socket
from pathlib import Path

import pytest

from helpers.processes import GONE_S, ONE_BY_ONE, START_S, kill, ran, started, summary, until, until_saved

pytestmark = [pytest.mark.slow, pytest.mark.spawn]

SMALL = ["data=random", "data.num_samples=256", "trainer.progress=false", "logger=none", "launcher.device=cpu"]
SLOW = [*SMALL, "model=toy", "model._target_=own_models.Slow", "trainer.max_epochs=100000", "hydra.run.dir=run"]

UNEQUAL = """
import os

import torch

from ddp_recipes.models import Toy


class Unequal(Toy):
    def __init__(self, **sizes):
        super().__init__(**sizes)
        torch.nn.init.constant_(self.net1.bias, float(os.environ["RANK"]))


class Share(torch.utils.data.Dataset):
    def __init__(self, **sizes):
        self.numbers = range(int(os.environ["RANK"]), 13, 2)

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, index):
        return torch.ones(10), torch.ones(5)
"""


@pytest.mark.parametrize(
    ("target", "what"),
    [
        ("model._target_=unequal.Unequal", "digest of the initial weights"),
        ("data.train._target_=unequal.Share", "samples of data.train"),
    ],
)
def test_ranks_with_other_weights_or_data_are_refused_before_step_1(target: str, what: str, folder: Path) -> None:
    (folder / "unequal.py").write_text(UNEQUAL)
    ended = ran(folder, *SMALL, "model=toy", target, "launcher.nproc_per_node=2")
    assert ended.status == 2
    assert "The ranks differ." in ended.err
    assert f"{what}:" in ended.err
    assert "on rank 0" in ended.err
    assert "on rank 1" in ended.err
    assert not (folder / "outputs").exists()


def test_a_second_run_in_the_directory_of_a_live_one_is_refused_and_the_first_goes_on(folder: Path) -> None:
    with started(folder, *SLOW, "launcher.nproc_per_node=1") as first:
        until_saved(first, folder / "run")
        config = (folder / "run" / "config.yaml").read_bytes()
        second = ran(folder, *SLOW, "launcher.nproc_per_node=1", "ckpt_path=auto", "seed=7")
        assert second.status == 2
        assert "in use by a run that is still going" in second.err
        assert (folder / "run" / "config.yaml").read_bytes() == config
        assert first.process.poll() is None
        first.signal(signal.SIGTERM)
        assert first.end().status == 75


def test_a_taken_port_is_told_and_nothing_hangs(folder: Path) -> None:
    with socket.create_server(("0.0.0.0", 0)) as other:
        port = str(other.getsockname()[1])
        variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ended = ran(folder, *SMALL, "model=toy", environ=variables)
    assert ended.status == 2
    assert f"MASTER_PORT={port} is taken" in ended.err
    assert not (folder / "outputs").exists()


def test_a_data_worker_that_is_killed_ends_the_run_and_is_named(folder: Path) -> None:
    overrides = [
        *SMALL,
        *ONE_BY_ONE,
        "data.num_workers=1",
        "model=toy",
        "trainer.max_epochs=100000",
        "hydra.run.dir=run",
        "launcher.nproc_per_node=1",
    ]
    with started(folder, *overrides) as run:
        until_saved(run, folder / "run")
        until(lambda: _children(run.pid), START_S, "no data worker")
        worker = _children(run.pid)[0]
        kill(worker, signal.SIGKILL)
        ended = run.end(GONE_S)
    assert ended.status == 1
    assert f"DataLoader worker (pid(s) {worker})" in ended.err or f"DataLoader worker (pid {worker})" in ended.err
    assert "A worker of data.num_workers ended: if nobody killed it, memory ran out" in ended.err
    assert summary(folder / "run")["status"] == "failed"


def _children(pid: int) -> list[int]:
    """Return the living children of a process."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        found += [int(child) for child in path.read_text().split() if os.path.exists(f"/proc/{child}/exe")]
    return found
