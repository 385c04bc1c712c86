"""How Hydra composes and runs a job, without its decorator: this package decides when, and what is shown of errors."""

import warnings
from typing import Any

import hydra.utils
from hydra import version
from hydra._internal.callbacks import Callbacks
from hydra._internal.hydra import Hydra
from hydra._internal.utils import _run_hydra, create_config_search_path, get_args_parser
from hydra.core.utils import JobReturn

__all__ = [
    "Callbacks",
    "Hydra",
    "create_config_search_path",
    "get_args_parser",
    "instantiate",
    "locate",
    "outcome",
    "run_hydra",
    "use_defaults_of_1_3",
]

# No public way: ``hydra.compose`` knows neither jobs nor sweeps, and ``hydra.main`` ends the process.
run_hydra = _run_hydra


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


def instantiate(node: Any, **options: Any) -> Any:
    """Return what ``hydra.utils.instantiate`` does; a user's own ``_target_`` may be anything that 1.3.8 allows.

    Hydra 1.4 warns of a call without an execution whitelist. Which targets users bring is not known before their config
    is, and to disable the checks would allow what 1.3.8 refuses (``eval``, ``os.remove``). So the warning is left out;
    Hydra 1.5, where it becomes an error, is not allowed in ``pyproject.toml``.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"\s*hydra\.utils\.instantiate\(\) resolved _target_")
        return hydra.utils.instantiate(node, **options)
