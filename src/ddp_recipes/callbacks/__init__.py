"""Callbacks: what a run may be given besides the loop."""

from ddp_recipes.callbacks.accumulation import GradientAccumulation
from ddp_recipes.callbacks.base import Callback
from ddp_recipes.callbacks.early_stopping import EarlyStopping
from ddp_recipes.callbacks.ema import EMA
from ddp_recipes.callbacks.learning_rate import LearningRateMonitor
from ddp_recipes.callbacks.profiler import BETWEEN_STEPS, Profiler
from ddp_recipes.callbacks.samples import SamplePredictions
from ddp_recipes.callbacks.summary import ModelSummary
from ddp_recipes.callbacks.text import SampleText

__all__ = [
    "BETWEEN_STEPS",
    "EMA",
    "Callback",
    "EarlyStopping",
    "GradientAccumulation",
    "LearningRateMonitor",
    "ModelSummary",
    "Profiler",
    "SamplePredictions",
    "SampleText",
]
