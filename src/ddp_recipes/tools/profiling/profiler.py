"""Where the time of a few steps goes: by phase, by operator, and in a trace."""

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from ddp_recipes.callbacks import Callback
from ddp_recipes.reporting.figures import leave_picture
from ddp_recipes.runtime.phases import recording
from ddp_recipes.tools.profiling.breakdown import BETWEEN_STEPS, breakdown, draw_profile

log = logging.getLogger(__name__)


class Profiler(Callback):
    """torch.profiler over a few steps of rank 0: where their time goes, by phase and by operator, and a trace.

    Its schedule is that of ``torch.profiler.schedule``; the table of operators has so many ``rows``.
    """

    def __init__(self, wait: int = 5, warmup: int = 2, active: int = 5, rows: int = 15) -> None:
        self.wait, self.warmup, self.active, self.rows = wait, warmup, active, rows
        self.directory: Path | None = None
        self.profile: Any = None
        self.phases = ExitStack()
        self.done = False

    def on_start(self, directory: Path | None, task: torch.nn.Module) -> None:
        """Start the schedule on rank 0."""
        if directory is None:
            return
        self.directory = directory
        self.phases.enter_context(recording())
        self.profile = torch.profiler.profile(
            schedule=torch.profiler.schedule(wait=self.wait, warmup=self.warmup, active=self.active, repeat=1),
            on_trace_ready=self._write,
            acc_events=True,  # there is one cycle, and torch 2.10 warns of what a second one would lose
        )
        self.profile.start()

    def on_step(self, step: int) -> None:
        if self.profile is not None:
            self.profile.step()

    def on_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._mark()

    def on_save(self, step: int) -> None:
        self._mark()

    def on_end(self) -> None:
        """Stop; a run shorter than the schedule writes the steps it had."""
        if self.profile is not None:
            self.profile.stop()
            self.profile = None
            self.phases.close()
            if not self.done:
                log.info("There is no profile: it begins after %d steps of a run.", self.wait + self.warmup)

    def _mark(self) -> None:
        if self.profile is not None:
            with torch.profiler.record_function(BETWEEN_STEPS):
                pass

    def _write(self, profile: Any) -> None:
        assert self.directory is not None
        self.done = True
        log.info("%s", self._report(profile))
        folder = self.directory / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        trace = folder / "rank_0.pt.trace.json"  # the name that TensorBoard's profiler plugin looks for
        profile.export_chrome_trace(str(trace))
        sort = "self_device_time_total" if torch.accelerator.is_available() else "self_cpu_time_total"
        log.info("operators of these steps; trace in %s\n%s", trace, profile.key_averages().table(sort, self.rows))

    def _report(self, profile: Any) -> str:
        """Show where the time went in TensorBoard and as a picture; return it as text."""
        assert self.directory is not None
        # A pipeline's schedule runs both passes.
        passes = ["forward", "backward"] if self.run.strategy.settings.pipeline is None else ["forward and backward"]
        found = breakdown(profile.events(), passes)
        if found is None:
            return "There is no whole step in the profile."
        self.run.logger.text("profile", found.markdown())
        leave_picture(self.directory, self.run.logger, "profile", lambda: draw_profile(found.host, found.title))
        return found.text()
