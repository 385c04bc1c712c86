"""How replicas learn together: a folder a strategy, with its settings, which load no torch, beside it."""

from typing import TYPE_CHECKING

from ddp_recipes._lazy import on_use

if TYPE_CHECKING:
    from ddp_recipes.strategies.base import Strategy as Strategy
    from ddp_recipes.strategies.ddp.settings import DDPSettings as DDPSettings
    from ddp_recipes.strategies.ddp.strategy import DDP as DDP
    from ddp_recipes.strategies.single.settings import SingleSettings as SingleSettings
    from ddp_recipes.strategies.single.strategy import Single as Single

ONE_PROCESS = ("single", "dp")  # options whose runs have one process, for a guess before the config is composed

_HOMES = {
    ".base": ["Strategy"],
    ".ddp.settings": ["DDPSettings"],
    ".ddp.strategy": ["DDP"],
    ".single.settings": ["SingleSettings"],
    ".single.strategy": ["Single"],
}
__all__ = [name for names in _HOMES.values() for name in names]
__getattr__ = on_use(__name__, _HOMES, found=True)
