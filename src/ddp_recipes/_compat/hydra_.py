"""How Hydra composes and runs a job, without its decorator: this package decides when, and what is shown of errors."""

from typing import Any

from hydra._internal.callbacks import Callbacks
from hydra._internal.hydra import Hydra
from hydra._internal.utils import _run_hydra, create_config_search_path, get_args_parser
from hydra.core.utils import JobReturn

__all__ = ["Callbacks", "Hydra", "create_config_search_path", "get_args_parser", "locate", "outcome", "run_hydra"]

# No public way: ``hydra.compose`` knows neither jobs nor sweeps, and ``hydra.main`` ends the process.
run_hydra = _run_hydra


def locate(target: str) -> Any:
    """Return what a dotted name stands for: ``hydra._internal.utils._locate``, or the public ``get_object``.

    That one is the same, and also logs the error.

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
