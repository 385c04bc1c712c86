"""How a signal ends a sweep, also where Hydra's launcher has jobs in processes of their own. Loads no torch."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from ddp_recipes.errors import Preempted, RecipeError
from ddp_recipes.runtime.job import ASKS_TO_STOP
from ddp_recipes.runtime.process import children, die_with_parent, is_running, name_of, set_name

AFTER_SIGNAL_S = 30.0  # for jobs to save; their launcher ends them before
_JOB = "job "  # the name of a process begins so, as long as it runs one


class SweepStopped(BaseException):
    """Ends a sweep: Hydra takes an ``Exception`` for the job's own and starts the next one."""

    def __init__(self, reason: RecipeError) -> None:
        self.reason = reason


_stopped: BaseException | None = None  # in this process, to which joblib gives the next job


@contextmanager
def job_of(sweep: int, number: int) -> Iterator[None]:
    """Run a job; one in a process that a sweep has started can be told to stop, and ends with the sweep.

    Args:
        sweep: the process of the sweep.
    """
    global _stopped
    if os.getppid() != sweep or threading.current_thread() is not threading.main_thread():
        yield
        return
    if _stopped is not None:
        raise _stopped
    die_with_parent()
    set_name(f"{_JOB}{number}")
    former = signal.signal(signal.SIGTERM, signal.default_int_handler)  # else joblib ends all where one dies of it
    try:
        yield
    except (SweepStopped, KeyboardInterrupt) as stop:
        _stopped = stop
        raise
    finally:
        set_name("between jobs")
        signal.signal(signal.SIGTERM, former)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """End a sweep at a signal that asks to stop, once all jobs have saved. One in this process has its own handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = {number: signal.signal(number, _stop) for number in ASKS_TO_STOP}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _stop(number: int, frame: FrameType | None) -> None:
    """Tell the jobs to stop, wait for them, and end the sweep."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # another Ctrl-C ends all at once
    name = signal.Signals(number).name
    if not (jobs := [child for child in children() if _has_job(child)]):
        raise KeyboardInterrupt(*([] if number == signal.SIGINT else [f"stopped by {name}"]))
    for job in jobs:
        os.kill(job, signal.SIGTERM)
    deadline = time.monotonic() + AFTER_SIGNAL_S
    while any(map(_has_job, jobs)) and time.monotonic() < deadline:
        time.sleep(0.05)
    raise SweepStopped(
        Preempted(f"The sweep was stopped by {name}. To go on, call it again with the same hydra.sweep.dir.")
    )


def _has_job(process: int) -> bool:
    return is_running(process) and name_of(process).startswith(_JOB)
