"""The exponential moving average of the weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from ddp_recipes._compat.torch_ import local
from ddp_recipes.callbacks.base import Callback
from ddp_recipes.errors import RequestError
from ddp_recipes.runtime.tensors import copied, rows_here
from ddp_recipes.tasks.task import outside

__all__ = ["EMA"]


class EMA(Callback):
    """Validate, save and end with averages of the weights, each ``decay * average + (1 - decay) * weight``.

    A checkpoint's model is the averages, and the weights that are trained are this callback's state in it. Buffers, as
    of batch norm, are not averaged: they are the trained model's.

    Args:
        every_n_steps: optimizer steps between two updates.
        start_step: the averages begin with the weights after the first update from this step on; the model is its own
            average until then.

    Raises:
        RequestError: a value is not allowed.
    """

    def __init__(self, decay: float = 0.999, every_n_steps: int = 1, start_step: int = 0) -> None:
        if not 0 <= decay < 1 or every_n_steps < 1 or start_step < 0:
            raise RequestError(
                f"callbacks.ema: decay={decay}, every_n_steps={every_n_steps}, start_step={start_step}. Allowed: decay "
                f"from 0 to below 1, every_n_steps at least 1, start_step at least 0."
            )
        self.every_n_steps, self.start_step = every_n_steps, start_step
        self.update = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        self.begun, self.swapped = False, False
        self.averages: dict[str, Tensor] = {}  # of this rank's parameters; while swapped, the weights that are trained
        self.trained: Mapping[str, Any] = {}  # the whole model's weights, from a checkpoint or for one

    def check(self) -> None:
        """Refuse a second one: only one of them can be the model."""
        names = [f"callbacks.{name}" for name, each in self.run.callbacks.items() if isinstance(each, EMA)]
        if len(names) > 1:
            raise RequestError(
                f"{' and '.join(names)} would each be the model that is validated. Leave out all but one."
            )
        for name, parameter in self.run.task.named_parameters():
            if parameter.is_floating_point() and parameter.itemsize < 4:
                raise RequestError(
                    f"{names[0]} adds a small part of each weight to its average, and {outside(name)} is of "
                    f"{parameter.dtype}, which rounds that away. Use trainer.precision=bf16-mixed, or leave it out."
                )

    def on_start(self, directory: Path | None, task: nn.Module) -> None:
        """Put the trained weights of a checkpoint in their place: the task has the averages from it."""
        if self.begun:
            held = {outside(name): each for name, each in task.named_parameters() if not each.is_meta}
            mine = {name: rows_here(self.trained[name], each) for name, each in held.items()}
            self.averages = {name: mine[name].to(each, copy=True) for name, each in self._parameters().items()}
            self.swapped, self.trained = True, {}
            self._swap(False)

    def on_step(self, step: int) -> None:
        """Update the averages."""
        if step < self.start_step or step % self.every_n_steps:
            return
        parameters = self._parameters()
        if not self.begun:
            self.begun, self.averages = True, {name: each.detach().clone() for name, each in parameters.items()}
        elif parameters:  # a stage may have none
            self.update(list(self.averages.values()), [each.detach() for each in parameters.values()], None)

    def on_validation_start(self, step: int) -> None:
        """Validate with the averages."""
        self._swap(True)

    def on_validation_end(self, step: int) -> None:
        """Go on with the weights."""
        self._swap(False)

    def on_save_start(self, step: int) -> None:
        """Keep the weights for :meth:`state`, on rank 0, and save the averages as the model."""
        if self.begun:
            weights = self.run.strategy.saved_weights(self.run.task)
            names = [outside(name) for name, _ in self.run.task.named_parameters()]
            if self.run.world.is_main or self.run.strategy.settings.kind == "sharded":
                self.trained = {name: copied(weights[name]) for name in names}
        self._swap(True)

    def on_save(self, step: int) -> None:
        """Go on with the weights."""
        self.trained = {}
        self._swap(False)

    def on_end(self) -> None:
        """Leave the averages as the model."""
        self._swap(True)

    def state(self) -> dict[str, Any]:
        """Return the weights that are trained."""
        return dict(self.trained)

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take them, until the run starts."""
        self.begun, self.trained = bool(state), state

    def _parameters(self) -> dict[str, Tensor]:
        """Return the parameters that this rank holds, or its rows of them."""
        return {outside(name): local(each) for name, each in self.run.task.named_parameters() if not each.is_meta}

    @torch.no_grad()
    def _swap(self, swapped: bool) -> None:
        """Let averages and weights change places, unless they have done so."""
        if not self.begun or swapped == self.swapped:
            return
        self.swapped = swapped
        for name, parameter in self._parameters().items():
            other = self.averages[name].clone()
            self.averages[name].copy_(parameter)
            parameter.copy_(other)
