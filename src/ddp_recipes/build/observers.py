"""The loggers and callbacks of a run, from their sections of the config."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddp_recipes.build.instantiate import check_values, locate, make, parameters_of, resolved
from ddp_recipes.callbacks import Callback
from ddp_recipes.errors import RequestError, nearest
from ddp_recipes.loggers import Logger, Loggers, folder_name
from ddp_recipes.tasks import Task

_EVENTS = [name for name in vars(Callback) if name.startswith("on_")]


def logger_sections(config: Mapping[str, Any], *, check: bool) -> dict[str, Mapping[str, Any]]:
    """Return the loggers' sections by their dotted names.

    Args:
        check: whether this rank makes them: then their classes and keys are looked at as well.

    Raises:
        RequestError: there is none, one does not take its keys, or two write into one folder.
    """
    node = config["logger"]
    loggers = {"logger": node} if "_target_" in node else {f"logger.{name}": node[name] for name in node}
    if not loggers or not all(isinstance(each, Mapping) for each in loggers.values()):
        raise RequestError(
            "logger has neither a _target_, the dotted name of a class, nor a section for each of several. Choose "
            "an option: logger=tensorboard, logger=csv, logger=none, or several: logger=[tensorboard,csv]."
        )
    folders: dict[str, str] = {}
    for section, each in loggers.items() if check else ():
        _check(each, section)
        other = folders.setdefault(_folder(each, section), section)
        if other != section:
            raise RequestError(
                f"{other} and {section} both write into {_folder(each, section)}/ of the run directory. Leave out one, "
                f"or give its class another `folder`."
            )
    return loggers


def make_logger(sections: Mapping[str, Mapping[str, Any]], run_directory: Path, purge_step: int | None) -> Logger:
    """Return the logger of these sections; each gets a folder of its own.

    Args:
        purge_step: on resume the first step that is logged anew.
    """
    loggers: list[Logger] = [
        make(node, section, directory=str(run_directory / _folder(node, section)), purge_step=purge_step)
        for section, node in sections.items()
    ]
    return loggers[0] if len(loggers) == 1 else Loggers(loggers)


def _folder(node: Mapping[str, Any], section: str) -> str:
    """Return the name of a logger's own folder: its class says it, else it is called after what makes it."""
    folder = getattr(locate(node["_target_"], section), "folder", None)
    return folder if isinstance(folder, str) else folder_name(node["_target_"].rpartition(".")[2])


def _check(node: Mapping[str, Any], section: str) -> None:
    """Refuse a logger that does not take the keys of its section, or not what every logger is given."""
    if "_target_" not in node:
        raise RequestError(f"{section} has no _target_, the dotted name of a class or function to call.")
    target = str(node["_target_"])
    parameters, given = parameters_of(target, section), {"directory", "purge_step"}
    values = resolved(node, section)
    check_values(locate(target, section), values, section)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    if not given <= parameters.keys():
        raise RequestError(
            f"{section}._target_={node['_target_']} does not take {' and '.join(sorted(given - parameters.keys()))}. "
            f"Every logger is given directory, its folder, and purge_step, on resume the first step logged anew."
        )
    allowed = [name for name in parameters if name not in given]
    for key in node:
        if key not in allowed and not (key.startswith("_") and key.endswith("_")):
            keys = f"Keys of {section}: {', '.join(allowed)}." if allowed else f"{section} has no keys."
            raise RequestError(f"{section}.{key} is not a key of {node['_target_']}. {keys}{nearest(key, allowed)}")
    for name in allowed:
        if parameters[name].default is inspect.Parameter.empty and name not in node:
            raise RequestError(f"{section}.{name} is missing: {node['_target_']} has no default for it.")
    found = locate(target, section)
    if isinstance(found, type) and issubclass(found, Logger):
        found.check(section, {name: values[name] for name in allowed if name in values})


def make_callbacks(nodes: Mapping[str, Any], task: Task) -> dict[str, Callback]:
    """Return the callbacks of the config's section, by name; the task may know others than ours.

    Raises:
        RequestError: one cannot be made, or is no callback.
    """
    callbacks = {}
    for name, node in nodes.items():
        made = make(node, f"callbacks.{name}")
        callback = made if isinstance(made, Callback) else task.callback(name, made)
        if callback is None:
            raise RequestError(
                f"callbacks.{name} makes a {type(made).__name__}, which is no ddp_recipes.Callback. Derive its "
                f"class from ddp_recipes.Callback and override the events that it needs. Callbacks of Lightning go "
                f"with task=lightning."
            )
        _check_events(f"callbacks.{name}", callback)
        callbacks[name] = callback
    return callbacks


def _check_events(section: str, callback: Callback) -> None:
    """Refuse a callback whose events do not take what they are given."""
    for name in _EVENTS:
        given = [*inspect.signature(getattr(Callback, name)).parameters][1:]
        taken = inspect.signature(getattr(callback, name))
        try:
            taken.bind(*given)
        except TypeError:
            raise RequestError(
                f"{section}: {type(callback).__name__}.{name} takes {taken}, and is given ({', '.join(given)}). Have "
                f"it take that."
            ) from None


def uncalled(callbacks: Mapping[str, Callback]) -> list[str]:
    """Return a warning for each method of one's own that is called like an event, and is none."""
    return [
        f"callbacks.{name}: {type(callback).__name__}.{method} is no event, so nothing calls it. Events: "
        f"{', '.join(_EVENTS)}.{nearest(method, _EVENTS)}"
        for name, callback in callbacks.items()
        for owner in type(callback).__mro__
        if not owner.__module__.startswith(("ddp_recipes.", "builtins"))
        for method in vars(owner)
        if method.startswith("on_") and method not in _EVENTS
    ]
