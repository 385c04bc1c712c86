"""Callbacks: what a run may be given besides the loop."""

from ddp_recipes.callbacks.base import BETWEEN_STEPS, Callback, EarlyStopping, Profiler

__all__ = ["BETWEEN_STEPS", "Callback", "EarlyStopping", "Profiler"]
