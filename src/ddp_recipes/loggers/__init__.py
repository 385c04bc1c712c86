"""Loggers: where numbers go."""

from typing import TYPE_CHECKING

from ddp_recipes._lazy import on_use

if TYPE_CHECKING:
    from ddp_recipes.loggers.base import Logger as Logger, Loggers as Loggers, folder_name as folder_name
    from ddp_recipes.loggers.csv import CSVLogger as CSVLogger
    from ddp_recipes.loggers.tensorboard import TensorBoardLogger as TensorBoardLogger

_HOMES = {
    ".base": ["Logger", "Loggers", "folder_name"],
    ".csv": ["CSVLogger"],
    ".tensorboard": ["TensorBoardLogger"],
}
__all__ = [name for names in _HOMES.values() for name in names]
__getattr__ = on_use(__name__, _HOMES, found=True)
