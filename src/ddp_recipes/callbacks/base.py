"""What a run may be given besides the loop: its events, called on every rank alike."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ddp_recipes.config.parallelism import StrategySettings
from ddp_recipes.config.settings import TrainerSettings
from ddp_recipes.data.loader import Loader
from ddp_recipes.loggers import Logger
from ddp_recipes.runtime.tensors import OwnRows
from ddp_recipes.runtime.world import World
from ddp_recipes.tasks import Task


class Position(Protocol):
    """A point of the run: epoch and step."""

    @property
    def epoch(self) -> int: ...
    @property
    def batch(self) -> int:
        """How many batches of this epoch are done."""

    @property
    def step(self) -> int:
        """How many optimizer steps are done."""


class Replicas(Protocol):
    """The run's strategy; ``settings`` say what it means for the shape of the run."""

    settings: StrategySettings

    def gather(self, value: Any) -> list[Any] | None:
        """Return every rank's value in rank order on rank 0, ``None`` elsewhere. A collective."""

    def saved_weights(self, task: Task) -> Mapping[str, Tensor | OwnRows]:
        """Return the weights that this rank saves, under their names. A collective."""


class Running(Protocol):
    """A run as its callbacks see it.

    Attributes:
        trainer: its keys; one may be replaced, as long as every rank does it.
        optimizers: one, unless the task brings several.
        metrics: the latest of each, by name.
        logger: drops what it gets on all ranks but rank 0.
        devices: of this rank's replica.
        val: the validation sets, by what their metrics' names begin with.
        callbacks: all of the run, by their names.
        seed: what all that is random follows from.
    """

    trainer: TrainerSettings
    task: Task
    optimizers: Sequence[torch.optim.Optimizer]
    metrics: dict[str, float]
    logger: Logger
    devices: Sequence[torch.device]
    world: World
    val: Mapping[str, Loader]
    callbacks: "Mapping[str, Callback]"
    seed: int

    @property
    def cursor(self) -> Position: ...
    @property
    def strategy(self) -> Replicas: ...


class Callback:
    """Override what you need. Whatever an event decides must be the same on every rank; metrics are.

    Events are those of a training, ``mode=fit``: other modes make callbacks and call none.

    An error in a callback ends the run like an error in a step.
    """

    stop = False  # set it and the loop ends after this step, on every rank
    validates = False  # whether it validates once more before that, in an epoch that is validated
    accumulation: Mapping[int, int] = {}  # epoch -> trainer.accumulate_grad_batches from there on, which it sets
    run: Running  # what is being trained; set before check

    def check(self) -> None:
        """Refuse a run that this does not go with, by a ``RequestError``: nothing has been written yet."""

    def check_metrics(self, metrics: Collection[str]) -> None:
        """Refuse a run like :meth:`check`, once a validation of a few batches has shown which metrics there are."""

    def on_start(self, directory: Path | None, task: torch.nn.Module) -> None:
        """Training is about to begin; ``directory`` is the run directory on rank 0 and ``None`` elsewhere."""

    def on_epoch_start(self, epoch: int) -> None:
        """The first step of an epoch comes next, or of what is left of it after a resume."""

    def on_epoch_end(self, epoch: int) -> None:
        """The epoch's last step is done, and validated where a validation was due; not saved yet."""

    def on_step(self, step: int) -> None:
        """An optimizer step is done."""

    def on_validation_start(self, step: int) -> None:
        """A validation comes next."""

    def on_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """A validation is done; the weights are still those that it was done with."""

    def on_validation_end(self, step: int) -> None:
        """Do something after a validation, once all callbacks have had :meth:`on_validation`."""

    def on_save_start(self, step: int) -> None:
        """The state for a checkpoint is gathered next: weights, optimizer, :meth:`state` of the callbacks."""

    def on_save(self, step: int) -> None:
        """A checkpoint is written, or its state copied for writing in the background."""

    def on_end(self) -> None:
        """Training has ended, also by an error."""

    def state(self) -> dict[str, Any]:
        """Return what a resume needs: plain data."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take what :meth:`state` returned, before :meth:`check`; the task has the checkpoint's weights already."""
