"""Weights that are evaluated in the place of those that are trained: the class that has them, and moving averages."""

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

__all__ = ["EMA", "Evaluated"]


class Evaluated(Callback):
    """Validate, save and end with other weights than those that are trained.

    A checkpoint's model is the other ones, and the weights that are trained are this callback's state in it.

    Attributes:
        begun: whether there are others yet.
        swapped: whether they are in the model.
        evaluates: whether they were when a save began.
        aside: those that are not, of this rank's parameters.
    """

    def __init__(self) -> None:
        self.begun, self.swapped, self.evaluates = False, False, False
        self.aside: dict[str, Tensor] = {}
        self.trained: Mapping[str, Any] = {}  # the whole model's weights, from a checkpoint or for one

    def check(self) -> None:
        """Refuse a second one: only one of them can be the model."""
        names = [each.called(name) for name, each in self.run.callbacks.items() if isinstance(each, Evaluated)]
        if len(names) > 1:
            raise RequestError(
                f"{' and '.join(names)} would each be the model that is validated. Leave out all but one."
            )

    def on_start(self, directory: Path | None, task: nn.Module) -> None:
        """Put the trained weights of a checkpoint in their place: the task has the others from it."""
        if self.begun:
            held = {outside(name): each for name, each in task.named_parameters() if not each.is_meta}
            mine = {name: rows_here(self.trained[name], each) for name, each in held.items()}
            self.aside = {name: mine[name].to(each, copy=True) for name, each in self.parameters().items()}
            self.swapped, self.trained = True, {}
            self._swap(False)

    def on_validation_start(self, step: int) -> None:
        """Validate with the others."""
        self._swap(True)

    def on_validation_end(self, step: int) -> None:
        """Go on with the weights."""
        self._swap(False)

    def on_save_start(self, step: int) -> None:
        """Keep the weights for :meth:`state`, on rank 0, and save the others as the model; in a validation they are."""
        self.evaluates = self.swapped
        self._swap(False)
        if self.begun:
            weights = self.run.strategy.saved_weights(self.run.task)
            names = [outside(name) for name, _ in self.run.task.named_parameters()]
            if self.run.world.is_main or self.run.strategy.settings.kind == "sharded":
                self.trained = {name: copied(weights[name]) for name in names}
        self._swap(True)

    def on_save(self, step: int) -> None:
        """Go on with the weights, or with the validation."""
        self.trained = {}
        self._swap(self.evaluates)

    def on_end(self) -> None:
        """Leave the others as the model."""
        self._swap(True)

    def state(self) -> dict[str, Any]:
        """Return the weights that are trained."""
        return dict(self.trained)

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take them, until the run starts."""
        self.begun, self.trained = bool(state), state

    def called(self, name: str) -> str:
        """Return what messages call it, given its name among the callbacks."""
        return f"callbacks.{name}"

    def parameters(self) -> dict[str, Tensor]:
        """Return the parameters that this rank holds, or its rows of them."""
        return {outside(name): local(each) for name, each in self.run.task.named_parameters() if not each.is_meta}

    def _swap(self, swapped: bool) -> None:
        if self.begun and swapped != self.swapped:
            self.swapped = swapped
            with torch.no_grad():
                self.swap(swapped)

    def swap(self, swapped: bool) -> None:
        """Put the others in the model, or the weights back."""
        for name, parameter in self.parameters().items():
            other = self.aside[name].clone()
            self.aside[name].copy_(parameter)
            parameter.copy_(other)


class EMA(Evaluated):
    """Validate, save and end with averages of the weights, each ``decay * average + (1 - decay) * weight``.

    Buffers, as of batch norm, are not averaged: they are the trained model's.

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
        super().__init__()
        self.every_n_steps, self.start_step = every_n_steps, start_step
        self.update = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]

    def check(self) -> None:
        """Refuse weights whose type rounds away what one step adds to their averages."""
        super().check()
        own = next(name for name, each in self.run.callbacks.items() if each is self)
        for name, parameter in self.run.task.named_parameters():
            if parameter.is_floating_point() and parameter.itemsize < 4:
                raise RequestError(
                    f"callbacks.{own} adds a small part of each weight to its average, and {outside(name)} is of "
                    f"{parameter.dtype}, which rounds that away. Use trainer.precision=bf16-mixed, or leave it out."
                )

    def on_step(self, step: int) -> None:
        if step < self.start_step or step % self.every_n_steps:
            return
        parameters = self.parameters()
        if not self.begun:
            self.begun, self.aside = True, {name: each.detach().clone() for name, each in parameters.items()}
        elif parameters:  # a stage may have none
            self.update(list(self.aside.values()), [each.detach() for each in parameters.values()], None)
