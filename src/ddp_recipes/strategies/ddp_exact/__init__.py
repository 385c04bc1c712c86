"""The same bits on any number of processes."""

from typing import TYPE_CHECKING

from ddp_recipes._lazy import on_use

if TYPE_CHECKING:
    from ddp_recipes.strategies.ddp_exact.settings import DDPExactSettings as DDPExactSettings
    from ddp_recipes.strategies.ddp_exact.strategy import DDPExact as DDPExact

__all__ = ["DDPExact", "DDPExactSettings"]
__getattr__ = on_use(__name__, {".strategy": ["DDPExact"], ".settings": ["DDPExactSettings"]})
