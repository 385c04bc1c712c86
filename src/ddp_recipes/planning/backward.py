"""A backward pass node by node, for tensors on devices that are not there.

Autograd's own engine asks the driver for each device of the graph, so where there is no GPU it cannot run on tensors
that only say that they are on one. The graph can: its nodes are called here as the engine calls them, latest first,
each once all that it needs has come, and what a node saved is let go when it is done.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from heapq import heappop, heappush
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

_numbers = count(1 << 40)  # not those of the engine


def backward(roots: list[Tensor], accumulate: Callable[[Parameter, Tensor], None]) -> None:
    """Run the graph of a scalar loss, the only one in ``roots``, which is emptied: nothing may keep the graph alive.

    Args:
        accumulate: takes the gradient of a leaf.
    """
    with _one_pass():
        _run(roots, accumulate)


def _run(roots: list[Tensor], accumulate: Callable[[Parameter, Tensor], None]) -> None:
    loss = roots.pop()
    root: Any = loss.grad_fn
    waiting = _uses(root)
    gradients: dict[Any, dict[int, Tensor]] = {root: {0: torch.ones_like(loss)}}  # of nodes to come, by output
    ready: list[tuple[int, int, Any]] = [(0, 0, root)]
    entered = 0
    del loss, root
    while ready:
        *_, node = heappop(ready)
        given = gradients.pop(node, {})
        if hasattr(node, "variable"):
            if given:
                accumulate(node.variable, _fitted(given[0], node, 0))
            continue
        results = _call(node, [_fitted(given[at], node, at) if at in given else None for at in range(_outputs(node))])
        given.clear()
        for (following, at), gradient in zip(node.next_functions, results, strict=False):
            if following is None:
                continue
            if gradient is not None:
                there = gradients.setdefault(following, {})
                # The engine adds in place where nobody else has the tensor, which is mostly so.
                there[at] = there[at].add_(gradient) if at in there else gradient
            waiting[following] -= 1
            if waiting[following] == 0:
                del waiting[following]
                entered += 1
                heappush(ready, (_turn(following), entered, following))
        del node, results, following, gradient


@contextmanager
def _one_pass() -> Iterator[None]:
    """Give this pass a number, as the engine does: by it ``torch.utils.checkpoint`` computes only once again."""
    module: Any = torch._C
    asked, number = module._current_graph_task_id, next(_numbers)
    module._current_graph_task_id = lambda: number
    try:
        yield
    finally:
        module._current_graph_task_id = asked


def _uses(root: Any) -> Counter[Any]:
    """Return how many gradients come to each node."""
    uses: Counter[Any] = Counter()
    todo = [root]
    while todo:
        for following, _ in todo.pop().next_functions:
            if following is not None:
                uses[following] += 1
                if uses[following] == 1:
                    todo.append(following)
    return uses


def _turn(node: Any) -> int:
    """Return when a node comes among those that are ready: leaves at once, then the latest of the forward pass."""
    return -(1 << 62) if hasattr(node, "variable") else -node._sequence_nr()


def _outputs(node: Any) -> int:
    return len(node._input_metadata)


def _call(node: Any, gradients: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    run = node if callable(node) else node.apply  # a torch.autograd.Function of a user's own has apply
    results = run(*gradients)
    return results if isinstance(results, tuple) else (results,)


def _fitted(gradient: Tensor, node: Any, at: int) -> Tensor:
    """Return a gradient in the shape and dtype of what it is the gradient of, as the engine sees to it."""
    there = node._input_metadata[at]
    if gradient.shape != there.shape:
        gradient = gradient.sum_to_size(there.shape)
    return gradient if gradient.dtype == there.dtype else gradient.to(there.dtype)
