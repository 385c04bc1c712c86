"""How replicas learn together: one file a strategy."""

from ddp_recipes.strategies.base import Single, Strategy
from ddp_recipes.strategies.data_parallel import DataParallel
from ddp_recipes.strategies.ddp import DDP

__all__ = ["DDP", "DataParallel", "Single", "Strategy"]
