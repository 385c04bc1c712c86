"""Public names of a package that are imported when they are first used, so that a run loads what its config names."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def on_use(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package whose names are defined in its modules.

    Args:
        package: its ``__name__``.
        homes: for each public name the module that has it, as :func:`importlib.import_module` takes it.
    """

    def __getattr__(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(homes[name], package), name)

    return __getattr__
