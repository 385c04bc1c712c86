"""Who starts the ranks of one run: a module or folder a launcher. None of them loads torch before it has to."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp_recipes.launchers.auto import AutoLauncher
    from ddp_recipes.launchers.base import Launcher, Resources
    from ddp_recipes.launchers.env import EnvLauncher
    from ddp_recipes.launchers.local import LocalLauncher
    from ddp_recipes.launchers.reports import Death, Outcome, RankReport, decide
    from ddp_recipes.launchers.slurm.launcher import SlurmLauncher

__all__ = [
    "AutoLauncher",
    "Death",
    "EnvLauncher",
    "Launcher",
    "LocalLauncher",
    "Outcome",
    "RankReport",
    "Resources",
    "SlurmLauncher",
    "decide",
]

_HOME = {
    "AutoLauncher": "auto",
    "Death": "reports",
    "EnvLauncher": "env",
    "Launcher": "base",
    "LocalLauncher": "local",
    "Outcome": "reports",
    "RankReport": "reports",
    "Resources": "base",
    "SlurmLauncher": "slurm.launcher",
    "decide": "reports",
}


def __getattr__(name: str) -> Any:
    """Import a launcher when it is first used: a run loads the one that it starts with."""
    if name not in _HOME:
        raise AttributeError(f"module 'ddp_recipes.launchers' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(f"ddp_recipes.launchers.{_HOME[name]}"), name)
