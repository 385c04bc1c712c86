"""What makes the loop fast leaves the numbers alone: losses are those of PyTorch's own loop, bit for bit."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.distributed import Store
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from ddp_recipes.data.order import BatchPlan, Shuffled
from ddp_recipes.datasets import fake_images, random_regression
from ddp_recipes.models import MLP, Toy
from ddp_recipes.reporting.run_directory import Summary
from ddp_recipes.runtime.world import World
from ddp_recipes.testing import on_ranks
from helpers.marks import slow_but

Run = Callable[..., Summary]

SEED, SAMPLES, BATCH, LR = 7, 128, 16, 0.05
PIXELS = 3 * 8 * 8
CASES: dict[str, tuple[list[str], Callable[[], Dataset[Any]], Callable[[], nn.Module], nn.Module]] = {
    "numbers": (
        ["data=random", "model=toy"],
        partial(random_regression, SAMPLES, seed=SEED),
        Toy,
        nn.MSELoss(),
    ),
    "images": (
        ["data=fake_images", "data.image_size=8", "model=mlp", "model.hidden_features=[16]"],
        partial(fake_images, SAMPLES, 8, seed=SEED),
        partial(MLP, PIXELS, [16], 10),
        nn.CrossEntropyLoss(),
    ),
}


def by_hand(
    world: World,
    store: Store | None,
    make_dataset: Callable[[], Dataset[Any]],
    make_model: Callable[[], nn.Module],
    loss_of: nn.Module,
    fused: bool,
) -> list[float]:
    """Train an epoch as PyTorch's tutorials do, with the samples in the recipe's order; return this rank's losses."""
    torch.manual_seed(SEED)
    replica = model = make_model()
    if world.world_size > 1:
        dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.world_size)
        replica = DistributedDataParallel(model)
    plan = BatchPlan(Shuffled(SAMPLES, SEED), BATCH, num_shards=world.world_size)
    order = [plan.indices(0, batch, world.rank).tolist() for batch in range(plan.num_batches)]
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, fused=fused)
    losses = []
    for inputs, targets in DataLoader(make_dataset(), batch_sampler=order):
        optimizer.zero_grad()
        loss = loss_of(replica(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if dist.is_initialized():
        dist.destroy_process_group()
    return losses


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", slow_but([*CASES][:1], CASES))
def test_losses_of_an_epoch_are_those_of_a_loop_by_hand(
    name: str, world_size: int, fused: bool, run: Run, tmp_path: Path
) -> None:
    overrides, *parts = CASES[name]
    run(
        *overrides,
        f"seed={SEED}",
        f"data.num_samples={SAMPLES}",
        f"data.global_batch_size={BATCH}",
        "data.val=null",
        "optimizer=sgd",
        f"optimizer.lr={LR}",
        f"optimizer.fused={fused}",
        "trainer.max_epochs=1",
        "trainer.log_every_n_steps=1",
        "logger=tensorboard",
        directory=tmp_path / "run",
        world_size=world_size,
    )
    points = EventAccumulator(str(tmp_path / "run" / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    found = [point.value for point in points.Scalars("train/loss")]
    of_ranks = on_ranks(
        partial(by_hand, make_dataset=parts[0], make_model=parts[1], loss_of=parts[2], fused=fused), world_size
    )
    expected = [sum(losses) / world_size for losses in zip(*of_ranks, strict=True)]
    assert len(found) == SAMPLES // BATCH
    assert found == torch.tensor(expected, dtype=torch.float64).float().tolist()
    assert found[-1] < found[0], "it has learnt something"
