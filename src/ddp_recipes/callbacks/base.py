"""What a run may be given besides the loop: its events, called on every rank alike."""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from ddp_recipes.config.monitor import resolved
from ddp_recipes.loggers import Logger
from ddp_recipes.tasks import Task

log = logging.getLogger(__name__)

BETWEEN_STEPS = "validated or saved"  # a mark in a trace: what came before it belongs to no step


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


class EarlyStopping(Callback):
    """Stop when the monitored metric has not improved by more than ``min_delta`` in ``patience`` validations.

    Raises:
        RequestError: ``mode`` is ``auto``, and the metric's name does not tell which way it gets better.
        KeyError: in the first validation, if it has no such metric.
    """

    def __init__(
        self,
        monitor: str = "val/loss",
        mode: Literal["auto", "min", "max"] = "auto",
        patience: int = 3,
        min_delta: float = 0.0,
    ) -> None:
        self.monitor = monitor
        self.sign = -1.0 if resolved(mode, monitor, "callbacks.early_stopping.mode") == "max" else 1.0
        self.patience = patience
        self.min_delta = min_delta
        self.best = float("inf")
        self.waited = 0

    def on_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Compare with the best so far."""
        value = self.sign * metrics[self.monitor]
        if value < self.best - self.min_delta:
            self.best, self.waited = value, 0
            return
        self.waited += 1
        if self.waited >= self.patience:
            log.info("Early stopping: %s has not improved in %d validations.", self.monitor, self.waited)
            self.stop = True

    def state(self) -> dict[str, Any]:
        """Return the best value, and for how many validations it has been the best."""
        return {"best": self.best, "waited": self.waited}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore them."""
        self.best, self.waited = state["best"], state["waited"]


class Profiler(Callback):
    """torch.profiler over a few steps of rank 0: where their time goes, by phase and by operator, and a trace.

    Its schedule is that of ``torch.profiler.schedule``; the table of operators has so many ``rows``.
    """

    def __init__(self, wait: int = 5, warmup: int = 2, active: int = 5, rows: int = 15) -> None:
        self.wait, self.warmup, self.active, self.rows = wait, warmup, active, rows
        self.directory: Path | None = None
        self.profile: Any = None
        self.report: Callable[[Any], str] | None = None  # makes a table of phases; set by tools/profiling
        self.done = False

    def on_start(self, directory: Path | None, task: torch.nn.Module) -> None:
        """Start the schedule on rank 0."""
        if directory is None:
            return
        self.directory = directory / "tensorboard"
        self.profile = torch.profiler.profile(
            schedule=torch.profiler.schedule(wait=self.wait, warmup=self.warmup, active=self.active, repeat=1),
            on_trace_ready=self._write,
        )
        self.profile.start()

    def on_step(self, step: int) -> None:
        """Advance the schedule."""
        if self.profile is not None:
            self.profile.step()

    def on_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Leave a mark."""
        self._mark()

    def on_save(self, step: int) -> None:
        """Leave a mark."""
        self._mark()

    def on_end(self) -> None:
        """Stop; a run shorter than the schedule writes the steps it had."""
        if self.profile is not None:
            self.profile.stop()
            self.profile = None
            if not self.done:
                log.info("There is no profile: it begins after %d steps of a run.", self.wait + self.warmup)

    def _mark(self) -> None:
        if self.profile is not None:
            with torch.profiler.record_function(BETWEEN_STEPS):
                pass

    def _write(self, profile: Any) -> None:
        assert self.directory is not None
        self.done = True
        if self.report is not None:
            log.info("%s", self.report(profile.events()))
        self.directory.mkdir(parents=True, exist_ok=True)
        trace = self.directory / "rank_0.pt.trace.json"  # the name that TensorBoard's profiler plugin looks for
        profile.export_chrome_trace(str(trace))
        sort = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        log.info("operators of these steps; trace in %s\n%s", trace, profile.key_averages().table(sort, self.rows))
