"""Loggers: where numbers go."""

from ddp_recipes.loggers.base import Logger, Loggers, folder_name
from ddp_recipes.loggers.csv import CSVLogger
from ddp_recipes.loggers.mlflow import MLflowLogger
from ddp_recipes.loggers.tensorboard import TensorBoardLogger
from ddp_recipes.loggers.wandb import WandbLogger

__all__ = ["CSVLogger", "Logger", "Loggers", "MLflowLogger", "TensorBoardLogger", "WandbLogger", "folder_name"]
