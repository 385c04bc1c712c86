"""Who starts the ranks of one run: a module or folder a launcher. None of them loads torch before it has to."""

from typing import TYPE_CHECKING

from ddp_recipes._lazy import on_use

if TYPE_CHECKING:
    from ddp_recipes.launchers.base import AutoLauncher as AutoLauncher, Launcher as Launcher, Resources as Resources
    from ddp_recipes.launchers.env import EnvLauncher as EnvLauncher
    from ddp_recipes.launchers.local import LocalLauncher as LocalLauncher
    from ddp_recipes.launchers.reports import Death as Death, Outcome as Outcome, decide as decide
    from ddp_recipes.launchers.worker import RankReport as RankReport

_HOMES = {
    ".base": ["AutoLauncher", "Launcher", "Resources"],
    ".env": ["EnvLauncher"],
    ".local": ["LocalLauncher"],
    ".reports": ["Death", "Outcome", "decide"],
    ".worker": ["RankReport"],
}
__all__ = [name for names in _HOMES.values() for name in names]
__getattr__ = on_use(__name__, _HOMES, found=True)
