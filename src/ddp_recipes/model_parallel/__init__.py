"""One replica over several devices: which block is where, and micro-batches that keep the devices busy."""

from ddp_recipes.model_parallel.dry_run import DryRun
from ddp_recipes.model_parallel.micro_batches import in_micro_batches
from ddp_recipes.model_parallel.split import Stage, apart, split_model
from ddp_recipes.model_parallel.timing import timed

__all__ = ["DryRun", "Stage", "apart", "in_micro_batches", "split_model", "timed"]
