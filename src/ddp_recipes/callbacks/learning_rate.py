"""The learning rate of each parameter group."""

from pathlib import Path

from torch import nn

from ddp_recipes.callbacks.base import Callback


class LearningRateMonitor(Callback):
    """Log ``lr/<group>`` of every parameter group, as the step took it, whenever ``train/loss`` is logged.

    A group of ``optimizer.groups`` goes by its name, another one by its number, counted over all optimizers.
    """

    def on_start(self, directory: Path | None, task: nn.Module) -> None:
        """Begin with the rates of the first step."""
        self.next = self._rates()

    def on_step(self, step: int) -> None:
        """Log the rates, and look at those of the next step: the scheduler has set them."""
        if step % self.run.trainer.log_every_n_steps == 0:
            self.run.metrics.update(self.next)
            self.run.logger.scalars(self.next, step)
        self.next = self._rates()

    def _rates(self) -> dict[str, float]:
        groups = [group for optimizer in self.run.optimizers for group in optimizer.param_groups]
        return {f"lr/{group.get('name', number)}": float(group["lr"]) for number, group in enumerate(groups)}
