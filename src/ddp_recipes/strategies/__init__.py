"""How replicas learn together: a folder a strategy, with its settings, which load no torch, beside it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp_recipes.strategies.base import Strategy
    from ddp_recipes.strategies.ddp.settings import DDPSettings
    from ddp_recipes.strategies.ddp.strategy import DDP
    from ddp_recipes.strategies.ddp_exact.settings import DDPExactSettings
    from ddp_recipes.strategies.ddp_exact.strategy import DDPExact
    from ddp_recipes.strategies.ddp_pipeline.settings import DDPPipelineSettings
    from ddp_recipes.strategies.ddp_pipeline.strategy import DDPPipeline
    from ddp_recipes.strategies.dp.settings import DataParallelSettings
    from ddp_recipes.strategies.dp.strategy import DataParallel
    from ddp_recipes.strategies.fsdp.settings import FSDPSettings
    from ddp_recipes.strategies.fsdp.strategy import FSDP
    from ddp_recipes.strategies.single.settings import SingleSettings
    from ddp_recipes.strategies.single.strategy import Single

__all__ = [
    "DDP",
    "FSDP",
    "DDPExact",
    "DDPExactSettings",
    "DDPPipeline",
    "DDPPipelineSettings",
    "DDPSettings",
    "DataParallel",
    "DataParallelSettings",
    "FSDPSettings",
    "Single",
    "SingleSettings",
    "Strategy",
]

ONE_PROCESS = ("single", "dp")  # options whose runs have one process, for a guess before the config is composed

_FOLDER = {
    "DDP": "ddp",
    "DDPExact": "ddp_exact",
    "DDPPipeline": "ddp_pipeline",
    "DataParallel": "dp",
    "FSDP": "fsdp",
    "Single": "single",
}


def __getattr__(name: str) -> Any:
    """Import a name when it is first used: settings are asked for where torch is not loaded."""
    if name == "Strategy":
        return import_module("ddp_recipes.strategies.base").Strategy
    folder, module = _FOLDER.get(name.removesuffix("Settings")), "settings" if name.endswith("Settings") else "strategy"
    if folder is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"ddp_recipes.strategies.{folder}.{module}"), name)
