"""The model in stages, one process a stage, and replicas of it."""

from typing import TYPE_CHECKING

from ddp_recipes._lazy import on_use

if TYPE_CHECKING:
    from ddp_recipes.strategies.ddp_pipeline.settings import DDPPipelineSettings as DDPPipelineSettings
    from ddp_recipes.strategies.ddp_pipeline.strategy import DDPPipeline as DDPPipeline

__all__ = ["DDPPipeline", "DDPPipelineSettings"]
__getattr__ = on_use(__name__, {".strategy": ["DDPPipeline"], ".settings": ["DDPPipelineSettings"]})
