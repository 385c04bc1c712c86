"""Modules written for Lightning."""

from ddp_recipes.lightning.adapter import LightningTask

__all__ = ["LightningTask"]
