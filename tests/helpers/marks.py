"""Marks for some cases of a test only."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(quick: Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """Return the cases of a parametrized test, all marked ``slow`` but for the quick ones.

    So ``make test`` plays some of a test whose cases together take long.

    Raises:
        ValueError: one of the quick ones is no case.
    """
    kept, cases = list(quick), list(cases)
    if missing := [case for case in kept if case not in cases]:
        raise ValueError(f"{missing} are no cases. There are: {cases}.")
    return [
        case if case in kept else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in cases
    ]
