"""Callbacks: what a run may be given besides the loop."""

from typing import TYPE_CHECKING

from ddp_recipes._lazy import on_use

if TYPE_CHECKING:
    from ddp_recipes.callbacks.accumulation import GradientAccumulation as GradientAccumulation
    from ddp_recipes.callbacks.base import Callback as Callback
    from ddp_recipes.callbacks.early_stopping import EarlyStopping as EarlyStopping
    from ddp_recipes.callbacks.ema import EMA as EMA
    from ddp_recipes.callbacks.learning_rate import LearningRateMonitor as LearningRateMonitor
    from ddp_recipes.callbacks.memory import MemoryHistory as MemoryHistory
    from ddp_recipes.callbacks.samples import SamplePredictions as SamplePredictions
    from ddp_recipes.callbacks.summary import ModelSummary as ModelSummary
    from ddp_recipes.callbacks.text import SampleText as SampleText

_HOMES = {
    "EMA": ".ema",
    "Callback": ".base",
    "EarlyStopping": ".early_stopping",
    "GradientAccumulation": ".accumulation",
    "LearningRateMonitor": ".learning_rate",
    "MemoryHistory": ".memory",
    "ModelSummary": ".summary",
    "Profiler": "ddp_recipes.tools.profiling",  # where it was before
    "SamplePredictions": ".samples",
    "SampleText": ".text",
}
__all__ = [*_HOMES]
__getattr__ = on_use(__name__, _HOMES)
