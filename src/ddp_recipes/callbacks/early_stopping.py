"""Stop where the monitored metric no longer improves."""

import logging
from collections.abc import Collection, Mapping
from typing import Any, Literal

from ddp_recipes.callbacks.base import Callback
from ddp_recipes.config.settings import check_measured, resolved
from ddp_recipes.errors import RequestError

__all__ = ["EarlyStopping"]

log = logging.getLogger(__name__)


class EarlyStopping(Callback):
    """Stop when the monitored metric has not improved by more than ``min_delta`` in ``patience`` validations.

    Raises:
        RequestError: ``mode`` is ``auto``, and the metric's name does not tell which way it gets better; or, in the
            first validation, that has no such metric.

    A run without a validation set, or without the one of ``monitor``, is refused.
    """

    KEY = "callbacks.early_stopping.monitor"

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

    def check(self) -> None:
        """Refuse a run that never measures the metric."""
        sets = list(self.run.val)
        measured = self.run.task.names_metrics or any(self.monitor.startswith(f"{name}/") for name in sets)
        if not sets or (self.monitor.startswith("val/") and not measured):
            there = f"validation sets are {', '.join(sets)}" if sets else "there is no validation set"
            raise RequestError(
                f"{self.KEY}={self.monitor}, but {there}. "
                f"{f'Set it to {sets[0]}/loss, or another of their metrics.' if sets else 'Give one as data.val.'}"
            )

    def check_metrics(self, metrics: Collection[str]) -> None:
        """Refuse a metric that no validation measures."""
        if self.monitor.startswith("val") and len(self.run.val) == 1:
            check_measured(self.monitor, metrics, self.KEY)

    def on_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Compare with the best so far."""
        check_measured(self.monitor, metrics, self.KEY)
        value = self.sign * metrics[self.monitor]
        if value < self.best - self.min_delta:
            self.best, self.waited = value, 0
            return
        self.waited += 1
        if self.waited >= self.patience:
            log.info("Early stopping: %s has not improved in %d validations.", self.monitor, self.waited)
            self.stop = True

    def state(self) -> dict[str, Any]:
        """Return the best value, of what, and for how many validations it has been the best."""
        return {"best": self.best, "waited": self.waited, "monitor": self.monitor, "sign": self.sign}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore them: a run that was to end, and was lost before it had, has nothing left to do."""
        if (state.get("monitor", self.monitor), state.get("sign", self.sign)) != (self.monitor, self.sign):
            return  # what was the best says nothing of another metric
        self.best, self.waited = state["best"], state["waited"]
        self.stop = self.waited >= max(1, self.patience)
