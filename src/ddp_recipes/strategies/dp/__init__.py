"""torch's ``DataParallel``: one process, several GPUs."""

from typing import TYPE_CHECKING

from ddp_recipes._lazy import on_use

if TYPE_CHECKING:
    from ddp_recipes.strategies.dp.settings import DataParallelSettings as DataParallelSettings
    from ddp_recipes.strategies.dp.strategy import DataParallel as DataParallel

__all__ = ["DataParallel", "DataParallelSettings"]
__getattr__ = on_use(__name__, {".strategy": ["DataParallel"], ".settings": ["DataParallelSettings"]})
