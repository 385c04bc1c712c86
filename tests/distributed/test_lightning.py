"""A module written for Lightning learns what the plain module learns."""

import json
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from ddp_recipes import RequestError
from ddp_recipes.lightning.hooks import CALLED, REFUSED
from ddp_recipes.reporting.run_directory import Summary

Run = Callable[..., Summary]
Weights = Callable[[Summary], dict[str, Any]]

LIT = ["model._target_=own_parts.Lit", "task=lightning"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_it_learns_and_measures_what_the_plain_module_does(world_size: int, run: Run, weights: Weights) -> None:
    same = ["data.global_batch_size=16", "optimizer.lr=0.05", "scheduler=step", "scheduler.step_size=1"]
    plain = run(*same, "scheduler.gamma=0.5")
    lit = run("data.global_batch_size=16", *LIT, world_size=world_size)
    torch.testing.assert_close(weights(lit), weights(plain), rtol=0, atol=1e-6)
    for name in ("val/loss", "val/mae"):
        assert lit["metrics"][name] == pytest.approx(plain["metrics"][name], rel=1e-5)


def part(name: str) -> list[str]:
    return [f"model._target_=lightning_parts.{name}", "task=lightning"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_logged_metric_objects_count_each_sample_of_an_evaluation_once(world_size: int, run: Run) -> None:
    metrics = run("trainer.max_epochs=3", *part("Metric"), world_size=world_size)["metrics"]
    assert metrics["val/metric"] == pytest.approx(metrics["val/mae"], rel=1e-5)
    assert not any("train/mae" in name for name in metrics)


def test_valid_loss_is_the_loss_of_validation(run: Run) -> None:
    assert run(*part("Valid"))["metrics"]["val/loss"] == run(*LIT)["metrics"]["val/loss"]


def test_a_module_whose_validation_has_no_loss_is_refused(run: Run) -> None:
    with pytest.raises(RequestError, match=r"Silent\.validation_step returns no loss and logs none"):
        run(*part("Silent"))


def test_mode_test_runs_the_test_step(run: Run) -> None:
    assert run("mode=test", "data.test=${data.val}", *part("OwnTest"))["metrics"]["test/loss"] == 7


def test_hooks_that_are_not_called_are_refused_by_name(run: Run) -> None:
    refused = r"Hooks defines on_train_epoch_end, train_dataloader, .* Instead of train_dataloader: put the data set"
    with pytest.raises(RequestError, match=refused):
        run(*part("Hooks"))
    with pytest.raises(RequestError, match="Manual defines automatic_optimization"):
        run(*part("Manual"))
    with pytest.raises(RequestError, match="gives a ReduceLROnPlateau"):
        run(*part("Plateau"))


def test_an_override_for_an_optimizer_that_the_module_brings_is_refused(run: Run) -> None:
    for override in ("optimizer.lr=5", "optimizer=adam", "scheduler=cosine"):
        with pytest.raises(RequestError, match=f"{override}: Lit brings its own optimizer and scheduler"):
            run(override, *LIT)


LIST = """
import json
from lightning.pytorch import LightningModule
from lightning.pytorch.core import hooks
own = [LightningModule, hooks.ModelHooks, hooks.DataHooks, hooks.CheckpointHooks]
print(json.dumps([name for each in own for name in vars(each) if not name.startswith("_")]))
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("lightning") is None, reason="needs the package lightning")
def test_every_hook_of_the_installed_lightning_is_called_or_refused() -> None:
    """So that one that a new release adds is not ignored."""
    listed = subprocess.run([sys.executable, "-c", LIST], check=True, capture_output=True, text=True, timeout=120)
    for_users_to_call = {
        *("CHECKPOINT_HYPER_PARAMS_KEY", "CHECKPOINT_HYPER_PARAMS_NAME", "CHECKPOINT_HYPER_PARAMS_TYPE"),
        *("optimizers", "lr_schedulers", "trainer", "fabric", "example_input_array", "current_epoch", "global_step"),
        *("global_rank", "local_rank", "on_gpu", "strict_loading", "logger", "loggers", "device_mesh", "print", "log"),
        *("log_dict", "manual_backward", "toggle_optimizer", "untoggle_optimizer", "toggled_optimizer", "freeze"),
        *("clip_gradients", "unfreeze", "to_onnx", "to_torchscript", "to_tensorrt", "load_from_checkpoint"),
    }
    assert {*json.loads(listed.stdout)} - for_users_to_call <= CALLED | REFUSED


def test_a_module_without_training_step_is_refused(run: Run) -> None:
    with pytest.raises(RequestError, match="needs a module with training_step, and Toy has none"):
        run("task=lightning")
