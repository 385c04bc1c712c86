"""Tasks: module, loss and metrics, which a strategy wraps."""

from typing import TYPE_CHECKING

from ddp_recipes._lazy import on_use

if TYPE_CHECKING:
    from ddp_recipes.tasks.language_modeling import LanguageModelingTask as LanguageModelingTask
    from ddp_recipes.tasks.metrics import Accuracy as Accuracy, MeanAbsoluteError as MeanAbsoluteError
    from ddp_recipes.tasks.model_loss import ModelLossTask as ModelLossTask
    from ddp_recipes.tasks.task import (
        OwnOptimizers as OwnOptimizers,
        RunContext as RunContext,
        Schedule as Schedule,
        StepOutput as StepOutput,
        Surroundings as Surroundings,
        Task as Task,
    )

_HOMES = {
    ".language_modeling": ["LanguageModelingTask"],
    ".metrics": ["Accuracy", "MeanAbsoluteError"],
    ".model_loss": ["ModelLossTask"],
    ".task": ["OwnOptimizers", "RunContext", "Schedule", "StepOutput", "Surroundings", "Task"],
}
__all__ = [name for names in _HOMES.values() for name in names]
__getattr__ = on_use(__name__, _HOMES)
