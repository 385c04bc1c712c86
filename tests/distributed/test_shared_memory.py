"""Gradients that are averaged in memory: the numbers of gloo, and an end when another rank ends."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import Store

from ddp_recipes.reporting.run_directory import Summary
from ddp_recipes.runtime.messages import Messages
from ddp_recipes.runtime.world import World
from ddp_recipes.strategies.ddp import shared_memory
from ddp_recipes.strategies.ddp.settings import DDPSettings
from ddp_recipes.strategies.ddp.shared_memory import SharedMemory, join
from ddp_recipes.strategies.ddp.strategy import DDP
from ddp_recipes.testing import on_ranks
from helpers.marks import quick_each, slow_but
from helpers.patience import patience

Run = Callable[..., Summary]


def met(world: World, store: Store | None, work: Callable[[SharedMemory], Any], timeout_s: float = 30) -> Any:
    """Do something with the memory that ranks share."""
    from datetime import timedelta

    group = DDP(DDPSettings())
    group.setup(world, None if store is None else Messages(store), "gloo", timedelta(seconds=60), None)
    try:
        shared = join(world, timeout_s)
        assert shared is not None
        try:
            return work(shared)
        finally:
            shared.close()
    finally:
        group.teardown()


@pytest.mark.parametrize("model", quick_each(2, ["model=toy", "model=mlp model.hidden_features=[900,700]"]))
@pytest.mark.parametrize(
    "more", slow_but([""], ["", "strategy.static_graph=true", "trainer.accumulate_grad_batches=2"])
)
def test_two_ranks_end_with_the_bits_of_gloo(model: str, more: str, run: Run) -> None:
    """The larger one's gradients are put into memory in several pieces."""
    both = [
        run(*model.split(), *more.split(), f"strategy.shared_memory={wanted}", world_size=2)
        for wanted in ("true", "false")
    ]
    assert both[0]["weights_sha256"] == both[1]["weights_sha256"]


@pytest.mark.slow
def test_each_rank_has_the_mean_of_all_added_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "CHUNK", 4096)  # 1024 numbers at once
    sizes, kinds = (1, 1023, 1024, 1025, 5000), (torch.float32, torch.float64, torch.bfloat16)

    def numbers(rank: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(rank)
        return [torch.randn(size, generator=generator).to(kind) for kind in kinds for size in sizes]

    def work(shared: SharedMemory) -> list[Any]:
        mine = numbers(dist.get_rank())
        for _ in range(3):
            for tensor in mine:
                shared.mean(tensor)
        counts = torch.full((3, 700), 2**40 + dist.get_rank())
        shared.sum(counts)
        return [counts[2, 699].item(), *(tensor.tolist() for tensor in mine)]

    for world_size in (2, 3, 5):
        expected = [numbers(rank) for rank in range(world_size)]
        for _ in range(3):
            for of_ranks in zip(*expected, strict=True):
                total = of_ranks[0] * (1 / world_size)
                for tensor in of_ranks[1:]:
                    total += tensor * (1 / world_size)
                for tensor in of_ranks:
                    tensor.copy_(total)
        found = on_ranks(lambda world, store: met(world, store, work), world_size)
        for rank in range(world_size):
            total = world_size * 2**40 + sum(range(world_size))
            assert found[rank] == [total, *(tensor.tolist() for tensor in expected[rank])]


def test_a_rank_that_is_gone_is_named() -> None:
    def work(shared: SharedMemory) -> str:
        shared.mean(torch.ones(10))
        if dist.get_rank() == 1:
            return ""  # and closes
        with pytest.raises(RuntimeError) as caught:
            shared.mean(torch.ones(10))
        return str(caught.value)

    said = on_ranks(lambda world, store: met(world, store, work), 3)
    assert said[0] == "Connection closed by rank 1 in an all-reduce."
    assert said[2].startswith("Connection closed by rank ")


def test_a_rank_that_does_not_come_is_named() -> None:
    def work(shared: SharedMemory) -> str:
        if dist.get_rank() == 1:
            dist.barrier()
            return ""
        with pytest.raises(RuntimeError) as caught:
            shared.mean(torch.ones(10))
        dist.barrier()
        return str(caught.value)

    said = on_ranks(lambda world, store: met(world, store, work, timeout_s=0.3), 2)
    assert said[0] == "Timed out waiting 0.3 s for rank 1 in an all-reduce."


@pytest.mark.slow
def test_ranks_that_cannot_meet_use_gloo(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of another container, say, which is taken for this machine if nothing tells how many ranks are here."""
    expected = run("strategy.shared_memory=false", world_size=2)
    parent = os.getpid()

    class Elsewhere(socket.socket):
        def connect_ex(self, address: Any) -> int:
            assert os.getpid() != parent
            return super().connect_ex(f"{address}, of another network")

    monkeypatch.setattr(shared_memory.socket, "socket", Elsewhere)
    assert run(world_size=2)["weights_sha256"] == expected["weights_sha256"]


class Words(nn.Module):
    """Has sparse gradients."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.words = nn.Embedding(50, out_features, sparse=True)
        self.scale = nn.Parameter(torch.ones(out_features))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        chosen: torch.Tensor = self.words(input.abs().mul(10).long().clamp(max=49))
        return chosen.mean(dim=1) * self.scale


@pytest.mark.slow
def test_sparse_gradients_go_through_gloo(run: Run) -> None:
    model = ["model=linear", f"model._target_={__name__}.Words", "optimizer.momentum=0", "optimizer.fused=false"]
    together = run(*model, world_size=2)
    alone = run(*model, "strategy=single", "data.batch_size=16")
    assert together["metrics"]["val/loss"] == pytest.approx(alone["metrics"]["val/loss"], rel=1e-5)


DRAWN = """
import torch


class Drawn(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, number):
        return torch.ones(10), number % 5
"""


@pytest.mark.spawn
@pytest.mark.slow
def test_ranks_and_workers_meet_where_names_of_temporary_files_are_too_long_for_sockets(tmp_path: Path) -> None:
    (tmp_path / "drawn.py").write_text(DRAWN)
    (folder := tmp_path / ("long" * 30)).mkdir()
    command = [sys.executable, "-m", "ddp_recipes", "data=random", "~data.train", "~data.val", "model=linear"]
    command += ["+data.train._target_=drawn.Drawn", "+data.val._target_=drawn.Drawn", "data.num_workers=1"]
    command += ["task=classification", "launcher.nproc_per_node=2", "launcher.device=cpu", "trainer.max_steps=2"]
    environ = os.environ | {"TMPDIR": str(folder)}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=patience(60))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "gloo and shared memory" in done.stdout
