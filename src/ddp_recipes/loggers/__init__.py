"""Loggers: where numbers go."""

from ddp_recipes.loggers.base import Logger, TensorBoardLogger

__all__ = ["Logger", "TensorBoardLogger"]
