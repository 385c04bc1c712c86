"""Marks for some cases of a test only."""

from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

import pytest

FEW = 2  # cases, of which all are played before a change goes in


def needs(package: str) -> pytest.MarkDecorator:
    """Return the mark of a test that is skipped where one of the peers is not installed."""
    return pytest.mark.skipif(find_spec(package) is None, reason=f"needs the package {package}, of the extra peers")


def slow_but(quick: Iterable[Any], cases: Iterable[Any], daily: Iterable[Any] | None = None) -> list[Any]:
    """Return the cases of a parametrized test, all marked ``slow`` but for the quick ones.

    So ``make test`` plays some of a test whose cases together take long.

    Args:
        daily: the cases of ``make test-all``, beside the quick ones; others are marked ``nightly``. All if left out,
            but of more than two each fourth one.

    Raises:
        ValueError: one of the quick or daily ones is no case.
    """
    kept, cases = list(quick), list(cases)
    slow = [case for case in cases if case not in kept]
    often = list(daily) if daily is not None else slow[::4] if len(slow) > FEW else slow
    if missing := [case for case in (*kept, *often) if case not in cases]:
        raise ValueError(f"{missing} are no cases. There are: {cases}.")
    return [case if case in kept else _marked(case, "slow" if case in often else "nightly") for case in cases]


def quick_each(step: int, cases: Iterable[Any]) -> list[Any]:
    """Return the cases of a parametrized test, marked ``slow`` but for the first of each so many."""
    cases = list(cases)
    return slow_but(cases[::step], cases, daily=cases)


def at_night(*cases: Any) -> list[Any]:
    """Return cases of a parametrized test, marked ``nightly``: others show the same, but for a detail."""
    return [_marked(case, "nightly") for case in cases]


def _marked(case: Any, mark: str) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=getattr(pytest.mark, mark))
