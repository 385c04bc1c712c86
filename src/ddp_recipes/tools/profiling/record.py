"""Have the parts of a run record what they do, for a profiler."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import record_function

from ddp_recipes.callbacks import Profiler
from ddp_recipes.reporting.figures.profile import draw_profile
from ddp_recipes.strategies.ddp.shared_memory import ALL_REDUCE
from ddp_recipes.tools.profiling.breakdown import breakdown
from ddp_recipes.training.state import Run

Context = AbstractContextManager[Any]
LeavePicture = Callable[[str, Callable[[], bytes]], None]


def record(run: Run, leave_picture: LeavePicture) -> None:
    """Have the parts of a run record its phases, if there is a profiler to see them; else leave all as it is.

    Args:
        leave_picture: takes a name, and what draws a PNG.
    """
    profilers = [callback for callback in run.callbacks if isinstance(callback, Profiler)]
    if not profilers or not run.world.is_main:
        return
    # A pipeline's schedule runs both.
    passes = ["forward", "backward"] if run.strategy.settings.pipeline is None else ["forward and backward"]
    for profiler in profilers:
        profiler.report = partial(_report, run, passes, leave_picture)
    methods: dict[str, list[tuple[object, str]]] = {
        "backward": [(run.precision, "backward")],
        ALL_REDUCE: [(run.strategy, "reduce")],
        "optimizer": [
            (run.precision, "unscale"),
            (run.strategy, "norm"),
            (run.precision, "step"),
            (run.schedule, "tick"),
        ],
        "logging": [(run.logger, "scalars"), (run.progress, "advance"), (run.progress, "metrics")],
    }
    # Set on the objects themselves: others have them already, and a strategy may ask for their type.
    for phase, several in methods.items():
        for part, name in several:
            setattr(part, name, _call(phase, getattr(part, name)))
    for part, name, recorded in (
        (run.train, "batches", _batches),
        (run.precision, "forward", partial(_forward, passes[0])),
        (run.strategy, "part", _part),
        (run.strategy, "sum", _sum),
    ):
        setattr(part, name, recorded(getattr(part, name)))


def _call(phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        with record_function(phase):
            return function(*arguments, **options)

    return call


def _batches(batches: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    @wraps(batches)
    def fetched(*arguments: Any, **options: Any) -> Iterator[Any]:
        source = batches(*arguments, **options)
        fetch = _call("data", lambda: next(source, None))
        while (batch := fetch()) is not None:
            yield batch

    return fetched


def _forward(phase: str, forward: Callable[[], Context]) -> Callable[[], Context]:
    @contextmanager
    def context() -> Iterator[None]:
        with record_function(phase if torch.is_grad_enabled() else "validation"), forward():
            yield

    return context


def _part(part: Callable[[float], Context]) -> Callable[[float], Context]:
    @contextmanager
    def context(share: float) -> Iterator[None]:
        with ExitStack() as stack:
            with record_function(ALL_REDUCE):
                stack.enter_context(part(share))
            yield
            with record_function(ALL_REDUCE):  # a strategy may put the shard's gradients aside
                stack.close()

    return context


def _sum(total: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    # A sum is read at once: so the wait for a GPU is seen here.
    return _call("logging", lambda values: total(values).cpu())


def _report(run: Run, passes: Sequence[str], leave_picture: LeavePicture, events: Sequence[FunctionEvent]) -> str:
    """Show where the time went in TensorBoard and as a picture; return it as text."""
    found = breakdown(events, passes)
    if found is None:
        return "There is no whole step in the profile."
    run.logger.text("profile", found.markdown())
    leave_picture("profile", lambda: draw_profile(found.host, found.title))
    return found.text()
