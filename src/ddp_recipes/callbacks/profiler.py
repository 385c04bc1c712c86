"""Where the time of a few steps goes."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ddp_recipes.callbacks.base import Callback

log = logging.getLogger(__name__)

BETWEEN_STEPS = "validated or saved"  # a mark in a trace: what came before it belongs to no step


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
        sort = "self_device_time_total" if torch.accelerator.is_available() else "self_cpu_time_total"
        log.info("operators of these steps; trace in %s\n%s", trace, profile.key_averages().table(sort, self.rows))
