"""Public names of a package that are imported when they are first used, so that a run loads what its config names."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PUBLISHED = re.compile(r"^__all__ = \[([^]*]*)\]", re.MULTILINE)


def on_use(package: str, homes: Mapping[str, Sequence[str]], *, found: bool = False) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package whose names are defined in its modules.

    Args:
        package: its ``__name__``.
        homes: for each module, as :func:`importlib.import_module` takes it, the public names that it has.
        found: whether other names are those that the package's modules and folders publish in ``__all__``: a package
            with extras knows none of them by name.
    """
    home_of = {name: module for module, names in homes.items() for name in names}

    def __getattr__(name: str) -> Any:
        home = home_of.get(name) or (published(package).get(name) if found and not name.startswith("_") else None)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(home, package), name)

    return __getattr__


@cache
def published(package: str) -> dict[str, str]:
    """Return the names in ``__all__`` of a package's modules and folders, each with its module; none is imported."""
    spec = find_spec(package)
    names: dict[str, str] = {}
    for folder in map(Path, (spec and spec.submodule_search_locations) or ()):
        for path in sorted([*folder.glob("[!_]*.py"), *folder.glob("[!_]*/__init__.py")]):
            module = f"{package}.{path.parent.name if path.stem == '__init__' else path.stem}"
            for listed in PUBLISHED.findall(path.read_text(encoding="utf-8")):
                names |= dict.fromkeys(re.findall(r'"(\w+)"', listed), module)
    return names
