"""Tasks: module, loss and metrics, which a strategy wraps."""

from ddp_recipes.tasks.language_modeling import LanguageModelingTask
from ddp_recipes.tasks.model_loss import ModelLossTask
from ddp_recipes.tasks.schedule import OwnOptimizers, Schedule
from ddp_recipes.tasks.task import Accuracy, MeanAbsoluteError, StepOutput, Surroundings, Task

__all__ = [
    "Accuracy",
    "LanguageModelingTask",
    "MeanAbsoluteError",
    "ModelLossTask",
    "OwnOptimizers",
    "Schedule",
    "StepOutput",
    "Surroundings",
    "Task",
]
