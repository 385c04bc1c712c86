"""How long tests wait: the one place that knows how slow this machine is just now.

A time limit in a test is written as a quiet machine needs it, ``patience(10)``. Where more wants to run than there are
cores, other tests or somebody else's work, it grows in proportion; ``DDP_RECIPES_TEST_SLOWNESS`` says by how much at
the least.
"""

import os


def slowness() -> float:
    """Return how many times longer things take than on a quiet machine, as far as the load tells."""
    waiting = os.getloadavg()[0] / (os.cpu_count() or 1)
    return max(1.0, waiting, float(os.environ.get("DDP_RECIPES_TEST_SLOWNESS", 1)))


def patience(seconds: float) -> float:
    """Return how many seconds to wait for what takes at most so many on a quiet machine."""
    return seconds * slowness()


def timeout_s() -> int:
    """Return a ``launcher.timeout_s`` that is soon over, but not before ranks that are well have answered."""
    return round(patience(3))
