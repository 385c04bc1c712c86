"""Who starts the ranks of one run: a module or folder a launcher. None of them loads torch before it has to."""

from ddp_recipes.launchers.base import Launcher, Resources
from ddp_recipes.launchers.env import AutoLauncher, EnvLauncher
from ddp_recipes.launchers.local import LocalLauncher
from ddp_recipes.launchers.nodes import NodesLauncher
from ddp_recipes.launchers.reports import Death, Outcome, RankReport, decide
from ddp_recipes.launchers.slurm.launcher import SlurmLauncher

__all__ = [
    "AutoLauncher",
    "Death",
    "EnvLauncher",
    "Launcher",
    "LocalLauncher",
    "NodesLauncher",
    "Outcome",
    "RankReport",
    "Resources",
    "SlurmLauncher",
    "decide",
]
