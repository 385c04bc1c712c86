"""What happens in a run, told to a module's hooks."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ddp_recipes._compat.torchmetrics_ import is_updated, load_state, state_of
from ddp_recipes.callbacks import Callback
from ddp_recipes.errors import RunFailed
from ddp_recipes.lightning.update import ManualOptimizer
from ddp_recipes.training.state import Run

if TYPE_CHECKING:
    from ddp_recipes.lightning.adapter import LightningTask


class Events(Callback):
    """Calls the hooks of a task's module and of Lightning's callbacks as Lightning would."""

    run: Run

    def __init__(self, task: LightningTask) -> None:
        self.task = task
        self.begun = self.started = False
        self.optimizers: list[ManualOptimizer] = []

    def begin(self) -> None:
        """Say that the run begins: before validation is tried out."""
        if self.begun:
            return
        self.begun = True
        trainer = self.task.trainer
        trainer.run = run = self.run
        self.optimizers = [ManualOptimizer(self.task, run, each) for each in run.optimizers]
        self.task.hooks("on_fit_start")

    def on_start(self, directory: Path | None, task: torch.nn.Module) -> None:
        """Begin to train."""
        self.begin()
        self.started = True
        self.task.trainer.epoch = self.run.cursor.epoch
        self.task.hooks("on_train_start")

    def on_epoch_start(self, epoch: int) -> None:
        """Begin an epoch."""
        self.task.trainer.epoch = epoch
        with self._wrapped_anew():
            self.task.hooks("on_train_epoch_start")

    @contextmanager
    def _wrapped_anew(self) -> Iterator[None]:
        """Wrap the task again if other parameters are trained afterwards: a wrapper knows those of its beginning."""
        before = self._frozen()
        yield
        if self._frozen() != before and not self.run.strategy.settings.whole_model:
            raise RunFailed(
                f"{type(self.task.model).__name__} or a callback of it freezes other parameters than at the start, and "
                f"with strategy={self.run.strategy.settings.name} what ranks exchange is settled then. Choose "
                f"another strategy, or model.freeze."
            )
        if self._frozen() != before and self.run.world.world_size > 1:
            self.run.module = self.run.strategy.wrap(self.task, self.run.devices)

    def _frozen(self) -> list[str]:
        return [name for name, parameter in self.task.named_parameters() if not parameter.requires_grad]

    def on_step(self, step: int) -> None:
        """End a batch, and log what its step logged."""
        self.task.end_batch()
        run = self.run
        if step % run.trainer.log_every_n_steps == 0:
            self._log(self.task.training_log.steps(self.task.trainer.surroundings))

    def on_validation_start(self, step: int) -> None:
        """Begin to validate."""
        self.task.hooks("on_validation_model_zero_grad")

    def on_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """End a validation."""
        self.task.hooks("on_validation_end")
        self.task.hooks("on_validation_model_train")
        self.task.trainer.stage = "train"

    def on_epoch_end(self, epoch: int) -> None:
        """End an epoch, and log what it came to."""
        self.task.hooks("on_train_epoch_end")
        self._log(self.task.training_log.epoch(self.task.trainer.surroundings))

    def on_end(self) -> None:
        """End the run."""
        error = sys.exc_info()[1]
        if error is not None:
            self.task.hooks("on_exception", error)
            if self.task.trainer.datamodule is not None:
                self.task.data_hooks.of_module("on_exception", error)
            return
        for name in ("on_train_end", "on_fit_end"):
            self.task.hooks(name)
        self.task.tear_down()

    def state(self) -> dict[str, Any]:
        """Return what the module does not keep itself.

        Optimizer steps that it took, parameters that are not trained by now, and what the epoch came to so far.
        """
        around = self.task.trainer.surroundings
        metrics = self._metrics()
        updated = torch.tensor([[float(is_updated(metric)) for metric in metrics.values()]])
        anywhere = around.sum(updated).tolist() if metrics else []
        return {
            "steps": self.task.trainer.steps,
            "frozen": self._frozen(),
            "log": self.task.training_log.state(around),
            "metrics": {name: state_of(metrics[name]) for name, at in zip(metrics, anywhere, strict=True) if at},
        }

    def _metrics(self) -> dict[str, Any]:
        return {name: each for name, each in self.task.model.named_modules() if hasattr(each, "metric_state")}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore it."""
        self.task.trainer.steps = state["steps"]
        first = self.task.trainer.surroundings.world.is_main
        self.task.training_log.load_state(state["log"], first)
        metrics = self._metrics()
        for name in metrics.keys() & state["metrics"].keys():
            load_state(metrics[name], state["metrics"][name], first)
        with self._wrapped_anew():
            for name, parameter in self.task.named_parameters():
                if parameter.is_floating_point():
                    parameter.requires_grad_(name not in state["frozen"])

    def _log(self, values: dict[str, float]) -> None:
        if values:
            plain = {name.removesuffix("_epoch"): value for name, value in values.items()}  # for whoever follows it
            self.run.metrics.update(plain | values)
            unlogged = self.task.training_log.unlogged
            self.run.logger.scalars({k: v for k, v in values.items() if k not in unlogged}, self.run.cursor.step)
