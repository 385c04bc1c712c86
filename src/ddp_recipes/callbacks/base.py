"""What a run may be given besides the loop: its events, called on every rank alike."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from ddp_recipes.loggers import Logger
from ddp_recipes.tasks import Task

class Running(Protocol):
    """A run as its callbacks see it."""

    task: Task
    optimizers: Sequence[torch.optim.Optimizer]  # one, unless the task brings several
    metrics: dict[str, float]  # the latest of each, by name
    logger: Logger  # drops what it gets on all ranks but rank 0
    devices: Sequence[torch.device]  # of this rank's replica


class Callback:
    """Override what you need. Whatever an event decides must be the same on every rank; metrics are.

    An error in a callback ends the run like an error in a step.
    """

    stop = False  # set it and the loop ends after this step, on every rank
    run: "Running"  # what is being trained; set before on_start

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
        """A validation is done."""

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
        """Restore what :meth:`state` returned."""
