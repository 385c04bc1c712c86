"""Hydra configs to distributed PyTorch runs: one config, one command, one run directory."""

from typing import TYPE_CHECKING

from ddp_recipes._lazy import on_use
from ddp_recipes._version import __version__
from ddp_recipes.errors import Preempted, RecipeError, RequestError, RunFailed

if TYPE_CHECKING:
    from ddp_recipes.callbacks import Callback as Callback
    from ddp_recipes.checkpointing.export import export as export
    from ddp_recipes.config.parallelism import StrategySettings as StrategySettings
    from ddp_recipes.loggers import Logger as Logger
    from ddp_recipes.main import run as run
    from ddp_recipes.runtime.world import World as World
    from ddp_recipes.strategies import Strategy as Strategy
    from ddp_recipes.tasks import StepOutput as StepOutput, Task as Task

_HOMES = {
    ".callbacks": ["Callback"],
    ".checkpointing.export": ["export"],
    ".config.parallelism": ["StrategySettings"],
    ".loggers": ["Logger"],
    ".main": ["run"],
    ".runtime.world": ["World"],
    ".strategies": ["Strategy"],
    ".tasks": ["StepOutput", "Task"],
}
_NAMES = [name for names in _HOMES.values() for name in names]

__all__ = ["Preempted", "RecipeError", "RequestError", "RunFailed", "__version__", *_NAMES]

__getattr__ = on_use(__name__, _HOMES)
