"""Stop where the monitored metric no longer improves."""

import logging
from collections.abc import Mapping
from typing import Any, Literal

from ddp_recipes.callbacks.base import Callback
from ddp_recipes.config.monitor import resolved

log = logging.getLogger(__name__)


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
