"""torch's autograd engine, the nodes of its graphs, and its profiler."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable, profiler


def run_backward(loss: Tensor) -> None:
    """Add a scalar loss's gradients to those that are there: ``Variable._execution_engine``, or ``Tensor.backward``."""
    engine = getattr(Variable, "_execution_engine", None)
    if engine is None:
        loss.backward()  # type: ignore[no-untyped-call]
        return
    gradient = torch.ones_like(loss)
    engine.run_backward((loss,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def current_node() -> Any:
    """Return the node whose backward runs, or ``None``: ``torch._C._current_autograd_node``. No public way."""
    return torch._C._current_autograd_node()


def in_backward() -> bool:
    """Whether the engine runs a backward pass: ``torch._C._current_graph_task_id``. No public way."""
    return torch._C._current_graph_task_id() != -1


def next_sequence_number() -> int:
    """Return the number that the next node gets: ``torch._C._autograd._get_sequence_nr``. No public way."""
    return torch._C._autograd._get_sequence_nr()


def sequence_number(node: Any) -> int:
    """Return a node's number, which grows in the order of the forward pass: ``Node._sequence_nr``. No public way."""
    number: int = node._sequence_nr()
    return number


def metadata_of(node: Any) -> Any:
    """Return the shape and dtype of each of the outputs that a node is of: ``Node._input_metadata``. No public way."""
    return node._input_metadata


@contextmanager
def pass_numbered(number: int) -> Iterator[None]:
    """Give a backward pass that the engine does not run a number, as the engine does.

    ``torch.utils.checkpoint`` gets it from ``torch._C._current_graph_task_id``. No public way.
    """
    module: Any = torch._C
    original = module._current_graph_task_id
    module._current_graph_task_id = lambda: number
    try:
        yield
    finally:
        module._current_graph_task_id = original


def is_profiled() -> bool:
    """Whether a profiler is at work: ``torch.autograd.profiler._is_profiler_enabled``; without it, yes."""
    return bool(getattr(profiler, "_is_profiler_enabled", True))
