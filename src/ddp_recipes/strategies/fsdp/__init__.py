"""A model's parameters dealt to the ranks; those of a block are whole only while it runs."""

from typing import TYPE_CHECKING

from ddp_recipes._lazy import on_use

if TYPE_CHECKING:
    from ddp_recipes.strategies.fsdp.settings import FSDPSettings as FSDPSettings
    from ddp_recipes.strategies.fsdp.strategy import FSDP as FSDP

__all__ = ["FSDP", "FSDPSettings"]
__getattr__ = on_use(__name__, {".strategy": ["FSDP"], ".settings": ["FSDPSettings"]})
