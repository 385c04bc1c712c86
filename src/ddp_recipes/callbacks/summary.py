"""What a model consists of."""

import logging
from pathlib import Path

from torch import nn

from ddp_recipes.callbacks.base import Callback
from ddp_recipes.errors import RequestError
from ddp_recipes.tasks import Task

__all__ = ["ModelSummary"]

log = logging.getLogger(__name__)


class ModelSummary(Callback):
    """Log a table of the model's modules at the start: their classes, parameters and how many of them are trained.

    Args:
        max_depth: how many dots a module's name may have and one more; -1: any number.
    """

    def __init__(self, max_depth: int = 1) -> None:
        if max_depth < -1 or max_depth == 0:
            raise RequestError(f"callbacks.model_summary.max_depth={max_depth}. Allowed: -1 for all, or at least 1.")
        self.max_depth = max_depth

    def on_start(self, directory: Path | None, task: nn.Module) -> None:
        if directory is not None and isinstance(task, Task):
            log.info("the model's modules\n%s", table(task.model, self.max_depth))


def table(model: nn.Module, max_depth: int) -> str:
    """Return the table; the last row counts a parameter once that several modules share."""
    rows = [("module", "class", "parameters", "trained")]
    rows += [
        (name, type(module).__name__, *counts(module))
        for name, module in model.named_modules()
        if name and (max_depth < 0 or name.count(".") < max_depth)
    ]
    rows.append(("all", type(model).__name__, *counts(model)))
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        f"  {name:<{wide[0]}}  {kind:<{wide[1]}}  {count:>{wide[2]}}  {trained:>{wide[3]}}"
        for name, kind, count, trained in rows
    )


def counts(module: nn.Module) -> tuple[str, str]:
    """Return how many parameters a module has and how many of them are trained."""
    parameters = list(module.parameters())
    return (
        f"{sum(each.numel() for each in parameters):,}",
        f"{sum(each.numel() for each in parameters if each.requires_grad):,}",
    )
