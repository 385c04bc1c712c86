"""Which launcher a config leads to, and its checked keys. Loads no torch."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from ddp_recipes.config.keys import parse
from ddp_recipes.config.settings import LauncherSettings
from ddp_recipes.errors import RequestError

AUTO = "ddp_recipes.launchers.AutoLauncher"
BY_NAME = {name: f"ddp_recipes.launchers.{name.title()}Launcher" for name in ("local", "env", "slurm", "nodes")}


def launcher_class(section: Mapping[str, Any]) -> Any:
    """Return the class that ``launcher._target_`` names; without one, or with ``auto``'s, ``launcher.name`` chooses.

    Raises:
        RequestError: there is no such class, or it is no launcher.
    """
    target = section.get("_target_", AUTO)
    if target == AUTO:
        target = BY_NAME.get(str(section.get("name")), AUTO)
    module, _, name = str(target).rpartition(".")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise RequestError(
            f"launcher._target_={target} cannot be imported: {error}. Allowed: the dotted path of a class, such as "
            f"{BY_NAME['local']}, or one in a module that is installed or in the current folder."
        ) from None
    settings = getattr(found, "settings_class", None)
    if not (isinstance(settings, type) and issubclass(settings, LauncherSettings)):
        raise RequestError(
            f"launcher._target_={target} is no launcher: its settings_class is {settings}. Allowed: a subclass of "
            f"ddp_recipes.config.settings.LauncherSettings, whose fields are the keys of launcher.*."
        )
    return found


def launcher_settings(config: Mapping[str, Any]) -> LauncherSettings:
    """Return a config's ``launcher.*``, checked by the settings class of its launcher.

    Raises:
        RequestError: there is no such launcher, or a key or value is not allowed.
    """
    section = config["launcher"]
    settings: type[LauncherSettings] = launcher_class(section).settings_class
    return parse(settings, "launcher", {name: value for name, value in section.items() if name != "_target_"})
