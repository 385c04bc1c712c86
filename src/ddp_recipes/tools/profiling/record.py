"""Record the phases of a run's steps for its profiler, and report where their time went."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from torch.autograd.profiler_util import FunctionEvent

from ddp_recipes.callbacks import Profiler
from ddp_recipes.reporting.figures.profile import draw_profile
from ddp_recipes.runtime.phases import recording
from ddp_recipes.tools.profiling.breakdown import breakdown
from ddp_recipes.training.state import Run

LeavePicture = Callable[[str, Callable[[], bytes]], None]


@contextmanager
def record(run: Run, leave_picture: LeavePicture) -> Iterator[None]:
    """Record the phases of a run's steps where it has a ``Profiler``; otherwise do nothing.

    Args:
        leave_picture: takes a name, and what draws a PNG.
    """
    profilers = [callback for callback in run.callbacks.values() if isinstance(callback, Profiler)]
    if not profilers or not run.world.is_main:
        yield
        return
    for profiler in profilers:
        profiler.report = partial(_report, run, leave_picture)
    with recording():
        yield


def _report(run: Run, leave_picture: LeavePicture, events: Sequence[FunctionEvent]) -> str:
    """Show where the time went in TensorBoard and as a picture; return it as text."""
    # A pipeline's schedule runs both passes.
    passes = ["forward", "backward"] if run.strategy.settings.pipeline is None else ["forward and backward"]
    found = breakdown(events, passes)
    if found is None:
        return "There is no whole step in the profile."
    run.logger.text("profile", found.markdown())
    leave_picture("profile", lambda: draw_profile(found.host, found.title))
    return found.text()
