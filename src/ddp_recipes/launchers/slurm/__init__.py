"""Runs submitted to Slurm: ``launcher=slurm``. Loads no torch and no submitit."""

from ddp_recipes.launchers.slurm.launcher import SlurmLauncher, SlurmSettings

__all__ = ["SlurmLauncher", "SlurmSettings"]
