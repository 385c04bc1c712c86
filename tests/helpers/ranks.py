"""The warm ranks of a process of tests, and recipes that run on them."""

from typing import Any

from ddp_recipes import testing
from ddp_recipes.reporting.run_directory import Summary
from helpers.patience import patience

RANKS = testing.WarmRanks()


def run_recipe(*arguments: Any, **keys: Any) -> Summary:
    """Call :func:`ddp_recipes.testing.run_recipe` on warm ranks, which have as long as this machine needs."""
    return testing.run_recipe(*arguments, **{"ranks": RANKS, "timeout_s": patience(120), **keys})
