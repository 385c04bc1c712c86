"""Who starts the ranks of one run: a module or folder a launcher. None of them loads torch before it has to."""

from typing import TYPE_CHECKING

from ddp_recipes._lazy import on_use

if TYPE_CHECKING:
    from ddp_recipes.launchers.base import AutoLauncher as AutoLauncher, Launcher as Launcher, Resources as Resources
    from ddp_recipes.launchers.env import EnvLauncher as EnvLauncher
    from ddp_recipes.launchers.local import LocalLauncher as LocalLauncher
    from ddp_recipes.launchers.reports import (
        Death as Death,
        Outcome as Outcome,
        RankReport as RankReport,
        decide as decide,
    )

_HOMES = {
    "AutoLauncher": ".base",
    "Death": ".reports",
    "EnvLauncher": ".env",
    "Launcher": ".base",
    "LocalLauncher": ".local",
    "Outcome": ".reports",
    "RankReport": ".reports",
    "Resources": ".base",
    "decide": ".reports",
}
__all__ = [*_HOMES]
__getattr__ = on_use(__name__, _HOMES, found=True)
