"""The learning rate of each parameter group."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ddp_recipes.callbacks.base import Callback

__all__ = ["LearningRateMonitor"]


class LearningRateMonitor(Callback):
    """Log ``lr/<group>`` of every parameter group, as the step took it, whenever ``train/loss`` is logged.

    A group of ``optimizer.groups`` goes by its name, another one by its number, counted over all optimizers.
    """

    def __init__(self) -> None:
        self.taken: dict[str, float] = {}

    def on_start(self, directory: Path | None, task: nn.Module) -> None:
        """Look at the rates right before each step: schedules may change them at any time between two."""
        for optimizer in self.run.optimizers:
            optimizer.register_step_pre_hook(self._look)

    def on_step(self, step: int) -> None:
        if step % self.run.trainer.log_every_n_steps == 0:
            self.run.metrics.update(self.taken)
            self.run.logger.scalars(self.taken, step)

    def state(self) -> dict[str, Any]:
        """Return the rates of the last step that was taken: a loss scaler may skip the first one after a resume."""
        return {"taken": self.taken}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore them."""
        self.taken = dict(state.get("taken", {}))

    def _look(self, *_: Any) -> None:
        groups = [group for optimizer in self.run.optimizers for group in optimizer.param_groups]
        self.taken = {f"lr/{group.get('name', number)}": float(group["lr"]) for number, group in enumerate(groups)}
