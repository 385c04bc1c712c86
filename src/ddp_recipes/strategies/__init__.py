"""How replicas learn together: a folder a strategy, with its settings, which load no torch, beside it."""

from typing import TYPE_CHECKING

from ddp_recipes._lazy import on_use

if TYPE_CHECKING:
    from ddp_recipes.strategies.base import Strategy as Strategy
    from ddp_recipes.strategies.ddp.settings import DDPSettings as DDPSettings
    from ddp_recipes.strategies.ddp.strategy import DDP as DDP
    from ddp_recipes.strategies.ddp_exact.settings import DDPExactSettings as DDPExactSettings
    from ddp_recipes.strategies.ddp_exact.strategy import DDPExact as DDPExact
    from ddp_recipes.strategies.ddp_pipeline.settings import DDPPipelineSettings as DDPPipelineSettings
    from ddp_recipes.strategies.ddp_pipeline.strategy import DDPPipeline as DDPPipeline
    from ddp_recipes.strategies.dp.settings import DataParallelSettings as DataParallelSettings
    from ddp_recipes.strategies.dp.strategy import DataParallel as DataParallel
    from ddp_recipes.strategies.fsdp.settings import FSDPSettings as FSDPSettings
    from ddp_recipes.strategies.fsdp.strategy import FSDP as FSDP
    from ddp_recipes.strategies.single.settings import SingleSettings as SingleSettings
    from ddp_recipes.strategies.single.strategy import Single as Single

ONE_PROCESS = ("single", "dp")  # options whose runs have one process, for a guess before the config is composed

_HOMES = {
    "DDP": ".ddp.strategy",
    "FSDP": ".fsdp.strategy",
    "DDPExact": ".ddp_exact.strategy",
    "DDPExactSettings": ".ddp_exact.settings",
    "DDPPipeline": ".ddp_pipeline.strategy",
    "DDPPipelineSettings": ".ddp_pipeline.settings",
    "DDPSettings": ".ddp.settings",
    "DataParallel": ".dp.strategy",
    "DataParallelSettings": ".dp.settings",
    "FSDPSettings": ".fsdp.settings",
    "Single": ".single.strategy",
    "SingleSettings": ".single.settings",
    "Strategy": ".base",
}
__all__ = [*_HOMES]
__getattr__ = on_use(__name__, _HOMES)
