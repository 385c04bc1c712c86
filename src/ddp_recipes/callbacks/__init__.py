"""Callbacks: what a run may be given besides the loop."""

from ddp_recipes.callbacks.base import Callback
from ddp_recipes.callbacks.early_stopping import EarlyStopping
from ddp_recipes.callbacks.profiler import BETWEEN_STEPS, Profiler

__all__ = ["BETWEEN_STEPS", "Callback", "EarlyStopping", "Profiler"]
