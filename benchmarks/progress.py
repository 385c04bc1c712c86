"""What the progress bar costs: ``python -m benchmarks.progress``.

Prints the mean of 100,000 steps, of which hardly any draws, and that of a drawing; and both of ``rich.progress``.
Exit status 1 where a step takes 20 µs or more; about 0.2 µs is usual.
"""

import io
import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from ddp_recipes.reporting.progress import Bar

STEPS = 100_000
DRAWINGS = 1000
GOAL_US = 20.0


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        """Return yes."""
        return True


def microseconds(call: Callable[[int], object], times: int) -> float:
    """Return what one of so many calls takes."""
    began = time.perf_counter()
    for number in range(times):
        call(number)
    return 1e6 * (time.perf_counter() - began) / times


def ours(every: float, times: int) -> float:
    """Return the microseconds of a step, the bar being drawn each ``every`` seconds."""
    bar = Bar(Terminal())
    bar.every = every
    bar.start(total_steps=STEPS, first_step=0, samples_per_step=1)
    took = microseconds(lambda number: bar.advance(number, 0), times)
    bar.stop()
    return took


def rich_progress() -> tuple[float, float]:
    """Return those of ``rich.progress``, not drawn and drawn: a bar between two texts, refreshed by the caller."""
    columns = TextColumn("epoch 0"), BarColumn(bar_width=None), TextColumn("step {task.completed}/{task.total}")
    console = Console(file=Terminal(), force_terminal=True)
    with Progress(*columns, console=console, auto_refresh=False, expand=True, redirect_stdout=False) as bar:
        task = bar.add_task("", total=STEPS)
        step = microseconds(lambda number: bar.update(task, completed=number), STEPS)
        drawing = microseconds(lambda number: bar.update(task, completed=number, refresh=True), DRAWINGS)
    return step, drawing


if __name__ == "__main__":
    step, drawing = ours(Bar.every, STEPS), ours(0.0, DRAWINGS)
    rich_step, rich_drawing = rich_progress()
    print(f"progress bar: {step:.2f} µs a step (goal: below {GOAL_US:g} µs), {drawing:.0f} µs a drawing")
    print(f"rich.progress: {rich_step:.2f} µs a step, {rich_drawing:.0f} µs a drawing")
    raise SystemExit(step >= GOAL_US)
