"""How Hydra composes and runs a job, without its decorator: this package decides when, and what is shown of errors.

No public way: ``hydra.compose`` runs neither jobs nor sweeps, and ``hydra.main`` ends the process.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import hydra.utils
import omegaconf
from hydra import version
from hydra._internal.callbacks import Callbacks
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.core.utils import JobReturn
from hydra.errors import InstantiationException
from omegaconf import ListConfig, OmegaConf

__all__ = [
    "Callbacks",
    "Hydra",
    "create_config_search_path",
    "execution_whitelist",
    "get_args_parser",
    "instantiate",
    "locate",
    "outcome",
    "use_defaults_of_1_3",
]


def locate(target: str) -> Any:
    """Return what a dotted name stands for: ``hydra._internal.utils._locate``, or the public ``get_object``.

    That one is the same, and also logs the error. ``pkgutil.resolve_name`` hides what a user's module fails to import.

    Raises:
        ImportError, ValueError: there is nothing of this name.
    """
    try:
        from hydra._internal.utils import _locate
    except ImportError:
        from hydra.utils import get_object

        return get_object(target)
    return _locate(target)


def outcome(result: JobReturn) -> Any:
    """Return what a job returned, or raise its error: ``JobReturn._return_value``, or the public ``return_value``.

    That one also writes a line to standard error.
    """
    value = getattr(result, "_return_value", None)
    if isinstance(value, BaseException):
        raise value
    return result.return_value


def use_defaults_of_1_3() -> None:
    """Let Hydra 1.3 take its own defaults and not those of 1.0: ``version.setbase``, which 1.4 does without."""
    if hydra.__version__.startswith("1.3."):
        version.setbase("1.3")


def instantiate(node: Any, names: Sequence[str], **options: Any) -> Any:
    """Return what ``hydra.utils.instantiate`` makes of a node in which these names are, and no others.

    Hydra 1.4 would have those as its whitelist. But from 1.4.0rc3 on it asks that of a class or function as well that a
    call returns, which nobody knows before: so it gets all that a config may name.

    Raises:
        InstantiationException: there are others, or what is made fails.
    """
    if others := [target for target in _targets(node) if target not in names]:
        raise InstantiationException(f"'{others[0]}' is not in the whitelist of what was looked at.")
    with execution_whitelist(*names):
        return hydra.utils.instantiate(node, **options)


def _targets(node: Any) -> Iterator[Any]:
    """Yield what a node has to call, at any depth."""
    if isinstance(node, Mapping):
        if node.get("_target_") is not None:
            yield node["_target_"]
        node = list(node.values())
    if isinstance(node, list | tuple | ListConfig):
        for inside in node:
            yield from _targets(inside)


# Of Python's standard library, a config may make values, and nothing that acts.
OF_STANDARD_LIBRARY = ("collections.*", "datetime.*", "decimal.*", "fractions.*", "functools.partial", "math.*")


def execution_whitelist(*more: str) -> AbstractContextManager[Any]:
    """Return a context in which Hydra may call, for its own section, what is installed or in a folder of ``sys.path``.

    Hydra 1.4 asks for that list, ``hydra.utils.execution_whitelist``; 1.3.8 has one of what it refuses, which 1.4 still
    refuses of what is listed. A name counts as what it stands for: ``my_module.os.remove`` is refused.
    """
    whitelist = getattr(hydra.utils, "execution_whitelist", None)
    if whitelist is None:
        return nullcontext()
    folders = [folder or "." for folder in sys.path if os.path.isdir(folder or ".")]
    importable = {*sys.modules, *(file for folder in folders for file in os.listdir(folder))}
    packages = {name.partition(".")[0] for name in importable} - sys.stdlib_module_names
    listed: AbstractContextManager[Any] = whitelist(
        [*OF_STANDARD_LIBRARY, *more, *(f"{name}.*" for name in packages if name.isidentifier())]
    )
    return listed


def register_resolver(name: str, resolver: Callable[..., Any], *, replace: bool = False) -> None:
    """Register a resolver: ``register_resolver`` of OmegaConf 2.4, or ``register_new_resolver``, deprecated there.

    What it takes and returns is not checked against its annotations, as before 2.4.
    """
    if omegaconf.__version__.startswith("2.3."):  # whose register_resolver is another one, of before 2.1
        OmegaConf.register_new_resolver(name, resolver, replace=replace)
    else:
        register: Any = OmegaConf.register_resolver
        register(name, resolver, replace=replace, annotation_validation="off")
