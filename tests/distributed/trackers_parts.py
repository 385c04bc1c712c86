"""A callback that fails, and a task that logs."""

from typing import Any

from ddp_recipes import Callback
from ddp_recipes.tasks import StepOutput, Task


class Raises(Callback):
    """Fails at a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, step: int) -> None:
        if step == self.step:
            raise ValueError("the cat sat on the keyboard")


class Telling(Task):
    """Logs twice the number of each step."""

    def training_step(self, batch: Any) -> StepOutput:
        self.logger.scalars({"train/twice": 2.0 * self.global_step}, self.global_step)
        return super().training_step(batch)


class Silent(Task):
    """Has a step of its own, which measures nothing."""

    def training_step(self, batch: Any) -> StepOutput:
        inputs, targets = batch
        return StepOutput(self.loss(self.model(inputs), targets), {}, len(targets))
