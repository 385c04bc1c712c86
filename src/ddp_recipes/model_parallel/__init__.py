"""One replica over several devices: which block is where, and micro-batches that keep the devices busy."""

from typing import TYPE_CHECKING

from ddp_recipes._lazy import on_use

if TYPE_CHECKING:
    from ddp_recipes.config.parallelism import Stage as Stage
    from ddp_recipes.model_parallel.dry_run import DryRun as DryRun, timed as timed
    from ddp_recipes.model_parallel.micro_batches import (
        as_dict as as_dict,
        in_micro_batches as in_micro_batches,
        refuse_counts as refuse_counts,
    )
    from ddp_recipes.model_parallel.split import apart as apart, split_model as split_model

_HOMES = {
    ".dry_run": ["DryRun", "timed"],
    ".micro_batches": ["as_dict", "in_micro_batches", "refuse_counts"],
    ".split": ["apart", "split_model"],
    "ddp_recipes.config.parallelism": ["Stage"],
}
__all__ = [name for names in _HOMES.values() for name in names]
__getattr__ = on_use(__name__, _HOMES)
