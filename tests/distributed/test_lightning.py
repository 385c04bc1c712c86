"""A module written for Lightning learns what the plain module learns."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ddp_recipes import RequestError
from ddp_recipes.reporting.run_directory import Summary

Run = Callable[..., Summary]
Weights = Callable[[Summary], dict[str, Any]]

LIT = ["model._target_=own_parts.Lit", "task=lightning"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_it_learns_and_measures_what_the_plain_module_does(world_size: int, run: Run, weights: Weights) -> None:
    same = ["data.global_batch_size=16", "optimizer.lr=0.05", "scheduler=step", "scheduler.step_size=1"]
    plain = run(*same, "scheduler.gamma=0.5")
    # Whatever the config says of optimizer and scheduler, the module's own are used.
    lit = run("data.global_batch_size=16", "optimizer=adam", *LIT, world_size=world_size)
    torch.testing.assert_close(weights(lit), weights(plain), rtol=0, atol=1e-6)
    for name in ("val/loss", "val/mae"):
        assert lit["metrics"][name] == pytest.approx(plain["metrics"][name], rel=1e-5)


def test_a_module_without_training_step_is_refused(run: Run) -> None:
    with pytest.raises(RequestError, match="needs a module with training_step, and Toy has none"):
        run("task=lightning")
