"""Runs submitted to Slurm: ``launcher=slurm``."""

from typing import TYPE_CHECKING

from ddp_recipes._lazy import on_use

if TYPE_CHECKING:
    from ddp_recipes.launchers.slurm.launcher import SlurmLauncher as SlurmLauncher
    from ddp_recipes.launchers.slurm.settings import SlurmSettings as SlurmSettings

__all__ = ["SlurmLauncher", "SlurmSettings"]
__getattr__ = on_use(__name__, {"SlurmLauncher": ".launcher", "SlurmSettings": ".settings"})
