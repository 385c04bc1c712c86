"""How long tests wait: the one place that knows how slow this machine is just now.

A time limit in a test is written as a quiet machine needs it, ``patience(10)``. Where the cores are slower, or more
wants to run than there are cores, other tests or somebody else's work, it grows in proportion;
``DDP_RECIPES_TEST_SLOWNESS`` says by how much at the least.
"""

import os
from functools import cache
from time import perf_counter

ADDITIONS, QUIET_S = 50_000, 0.0015  # what a core of the machine for which limits are written takes for so many


def slowness() -> float:
    """Return how many times longer things take than on a quiet machine, as far as pace and load tell."""
    waiting = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    return max(_pace() * waiting, float(os.environ.get("DDP_RECIPES_TEST_SLOWNESS", 1)))


@cache
def _pace() -> float:
    """Return how many times longer a core computes: by the best of some tries, which others disturb the least."""
    return max(1.0, min(_time() for _ in range(10)) / QUIET_S)


def _time() -> float:
    begin = perf_counter()
    total = 0
    for number in range(ADDITIONS):
        total += number
    return perf_counter() - begin


def patience(seconds: float) -> float:
    """Return how many seconds to wait for what takes at most so many on a quiet machine."""
    return seconds * slowness()


def timeout_s() -> int:
    """Return a ``launcher.timeout_s`` that is soon over, but not before ranks that are well have answered."""
    return round(patience(3))
