"""Text that a language model writes after each validation."""

from collections.abc import Mapping

import torch

from ddp_recipes.callbacks.base import Callback
from ddp_recipes.datasets.windows import decode, encode
from ddp_recipes.errors import RequestError
from ddp_recipes.runtime.seeding import seed_step, step_key
from ddp_recipes.tasks import LanguageModelingTask

__all__ = ["SampleText"]


class SampleText(Callback):
    """Give the loggers what the model goes on with after a prompt, after each validation; for bytes as tokens.

    Args:
        prompt: what it goes on from.
        new_tokens: how many bytes it adds.
    """

    def __init__(self, prompt: str = "The ", new_tokens: int = 256) -> None:
        self.prompt, self.new_tokens = prompt, new_tokens

    def check(self) -> None:
        """Refuse a task that does not write, or a model that no process has as a whole."""
        if not isinstance(self.run.task, LanguageModelingTask):
            raise RequestError(
                f"callbacks=sample_text lets a language model write, and the task is a {type(self.run.task).__name__}. "
                f"Choose task=language_modeling, or leave it out."
            )
        if self.run.strategy.settings.kind == "staged":
            raise RequestError(
                "callbacks=sample_text runs the model token by token, and with this strategy no process has all of it. "
                "Leave it out."
            )

    def on_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Let the model write: the same text at the same step, on any number of ranks."""
        assert isinstance(self.run.task, LanguageModelingTask)
        seed_step(step_key(self.run.seed, step, 0), self.run.devices)
        with torch.no_grad():
            found = self.run.task.generate(encode(self.prompt)[None].to(self.run.devices[0]), self.new_tokens)
        self.run.logger.text(f"samples/step_{step:08d}", decode(found[0].cpu()))
