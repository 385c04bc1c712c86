"""The size of a checkpoint that is not written."""

import os
from typing import Any

import torch
from torch.serialization import skip_data

from ddp_recipes.build.recipe import Recipe
from ddp_recipes.build.run import make_run, make_stop_controller
from ddp_recipes.checkpointing.files import FORMAT
from ddp_recipes.strategies import Single
from ddp_recipes.tools.dry_run.memory import ReplicaStep
from ddp_recipes.tools.dry_run.pipeline import PipelineSteps
from ddp_recipes.training.state import gather_state


def checkpoint_bytes(recipe: Recipe, step: ReplicaStep | PipelineSteps) -> int:
    """Return the size of a checkpoint: it is written to where only the bytes are counted, with no data in it."""
    run = make_run(recipe, make_stop_controller(recipe), Single())  # there is nobody to gather from
    names, steps = [], recipe.total_steps
    if steps != 0:
        names = [f"train/{name}" for name in ("loss", "lr", "samples_per_second", "epoch", "grad_norm")]
    names += [f"{split}/{name}" for split in run.val for name in ("loss", *recipe.task.metrics)]
    state = gather_state(run) | {
        **step.state(),
        "metrics": dict.fromkeys(names, 0.0),
        "world_size": recipe.world.world_size,
        "checkpointer": {"values": {"1": 0.0}},
    }
    sink = _Counted()
    with step.mode, skip_data(materialize_fake_tensors=True):
        torch.save({"format": FORMAT, **state}, sink)  # type: ignore[arg-type]
    return sink.size


class _Counted:
    """A file that keeps nothing but its size."""

    def __init__(self) -> None:
        self.size = 0

    def write(self, data: Any) -> int:
        written = memoryview(data).nbytes
        self.size += written
        return written

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Skip what has no data."""
        self.size = offset + (self.size if whence == os.SEEK_CUR else 0)
        return self.size

    def flush(self) -> None:
        """Do nothing: nothing is held back."""
