"""A plugin of pytest for ``make separable``: leave out the tests of extras that are taken away.

    WITHOUT="a regular expression" python -m pytest -p benchmarks.without

A test is one of an extra if its own text or its parameters name it, wherever it stands.
"""

import inspect
import os
import re

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect them."""
    pattern = re.compile(os.environ["WITHOUT"])
    gone = [item for item in items if pattern.search(text_of(item))]
    config.hook.pytest_deselected(items=gone)
    items[:] = [item for item in items if item not in set(gone)]


def text_of(item: pytest.Item) -> str:
    """Return what a test says: its function's source, its name with the cases' ids, and its parameters."""
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    source = inspect.getsource(item.function) if isinstance(item, pytest.Function) else ""
    return f"{item.name}\n{list(parameters.values())!r}\n{source}"
