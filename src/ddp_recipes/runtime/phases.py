"""Phases of a training step as ranges in a profiler's trace, and what steps ask of torch again and again.

``trainer.fast_paths`` puts shorter ways to the same in the place of the latter.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from operator import methodcaller
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
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


@dataclass
class Calls:
    """Functions that this process calls; torch's own unless something else was put in their place.

    Attributes:
        backward: run backward from a loss.
        zero_grad: set an optimizer's gradients to None.
        made_of: the class or function to make an object by, for the one that a config names.
        with_large_memory: a context for what takes and frees much memory.
    """

    backward: Callable[[Tensor], None] = methodcaller("backward")
    zero_grad: Callable[[Optimizer], None] = methodcaller("zero_grad")
    made_of: Callable[[Any], Any] = lambda target: target
    with_large_memory: Callable[[], AbstractContextManager[None]] = nullcontext


CALLS = Calls()
