"""Phases of a training step as ranges in a profiler's trace."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch.profiler import record_function

ALL_REDUCE = "all-reduce"

_NOT_RECORDED = nullcontext()
_recording = False


def phase(name: str) -> AbstractContextManager[Any]:
    """Return the context in which a phase runs. It does nothing, at hardly any cost, outside of :func:`recording`."""
    return record_function(name) if _recording else _NOT_RECORDED


@contextmanager
def recording() -> Iterator[None]:
    """Record the phases of this process."""
    global _recording
    _recording = True
    try:
        yield
    finally:
        _recording = False
