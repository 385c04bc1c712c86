"""How replicas learn together: one file a strategy."""

from ddp_recipes.strategies.base import Single, Strategy
from ddp_recipes.strategies.data_parallel import DataParallel
from ddp_recipes.strategies.ddp import DDP
from ddp_recipes.strategies.ddp_exact import DDPExact
from ddp_recipes.strategies.ddp_pipeline import DDPPipeline

__all__ = ["DDP", "DDPExact", "DDPPipeline", "DataParallel", "Single", "Strategy"]
