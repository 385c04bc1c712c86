"""Loggers: where numbers go."""

from ddp_recipes.loggers.base import Logger, Loggers, folder_name
from ddp_recipes.loggers.csv import CSVLogger
from ddp_recipes.loggers.tensorboard import TensorBoardLogger

__all__ = ["CSVLogger", "Logger", "Loggers", "TensorBoardLogger", "folder_name"]
