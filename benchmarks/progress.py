"""What the progress bar costs a step that it does not draw: ``python -m benchmarks.progress``.

Prints the mean of 100,000 steps. Exit status 1 where it is 20 µs or more; about 0.2 µs is usual.
"""

import io
import time

from ddp_recipes.reporting.progress import Bar

STEPS = 100_000
GOAL_US = 20.0


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        """Return yes."""
        return True


def measure() -> float:
    """Return the microseconds of a step."""
    bar = Bar(Terminal())
    bar.start(total_steps=STEPS, first_step=0, samples_per_step=1)
    began = time.perf_counter()
    for step in range(STEPS):
        bar.advance(step, 0)
    seconds = time.perf_counter() - began
    bar.stop()
    return 1e6 * seconds / STEPS


if __name__ == "__main__":
    took = measure()
    print(f"progress bar: {took:.2f} µs a step (goal: below {GOAL_US:g} µs)")
    raise SystemExit(took >= GOAL_US)
