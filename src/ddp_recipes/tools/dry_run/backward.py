"""A backward pass node by node, for tensors on devices that are not there.

Autograd's own engine asks the driver for each device of the graph, so where there is no GPU it cannot run on tensors
that only say that they are on one. The graph can: its nodes are called here as the engine calls them, latest first,
each once all that it needs has come, and what a node saved is freed when it is done.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ddp_recipes._compat.model_parallel import metadata_of, pass_numbered, sequence_number

_numbers = count(1 << 40)  # not those of the engine

Roots = list[tuple[GradientEdge, Tensor]]  # where a graph begins, and the gradient that is given there


def roots_of(loss: Tensor) -> Roots:
    """Return where the graph of a scalar loss begins; they keep the graph, not the loss."""
    return [(get_gradient_edge(loss), torch.ones_like(loss))]


def backward(roots: Roots, accumulate: Callable[[Tensor, Tensor], None]) -> None:
    """Run the graph that begins at ``roots``, which are emptied: nothing may keep the graph alive.

    Args:
        accumulate: takes the gradient of a leaf: a parameter, or an input that requires one.
    """
    with pass_numbered(next(_numbers)):  # ``torch.utils.checkpoint`` computes once again for each number
        _run(roots, accumulate)


def _run(roots: Roots, accumulate: Callable[[Tensor, Tensor], None]) -> None:
    gradients = _given(roots)  # of nodes to come, by output
    waiting = _uses(gradients)
    entered = count()
    ready = [(_turn(node), next(entered), node) for node in gradients if node not in waiting]
    heapify(ready)
    while ready:
        *_, node = heappop(ready)
        given = gradients.pop(node, {})
        if hasattr(node, "variable"):
            if given:
                accumulate(node.variable, given[0])
            continue
        results = _call(node, [given.get(at) for at in range(len(metadata_of(node)))])
        given.clear()
        for (following, at), gradient in zip(node.next_functions, results, strict=False):
            if following is None:
                continue
            if gradient is not None:
                _add(gradients.setdefault(following, {}), at, _fitted(gradient, following, at))
            waiting[following] -= 1
            if waiting[following] == 0:
                del waiting[following]
                heappush(ready, (_turn(following), next(entered), following))
        del node, results, following, gradient


def _given(roots: Roots) -> dict[Any, dict[int, Tensor]]:
    gradients: dict[Any, dict[int, Tensor]] = {}
    while roots:
        edge, gradient = roots.pop()
        _add(gradients.setdefault(edge.node, {}), edge.output_nr, gradient)
    return gradients


def _add(there: dict[int, Tensor], at: int, gradient: Tensor) -> None:
    """Add a gradient to what there is, in place as the engine does it where nobody else has the tensor: mostly."""
    there[at] = there[at].add_(gradient) if at in there else gradient


def _uses(roots: Iterable[Any]) -> Counter[Any]:
    """Return how many gradients come to each node from others."""
    uses: Counter[Any] = Counter()
    seen = set(roots)
    todo = list(seen)
    while todo:
        for following, _ in todo.pop().next_functions:
            if following is not None:
                uses[following] += 1
                if following not in seen:
                    seen.add(following)
                    todo.append(following)
    return uses


def _turn(node: Any) -> int:
    """Return when a node comes among those that are ready: leaves at once, then the latest of the forward pass."""
    return -(1 << 62) if hasattr(node, "variable") else -sequence_number(node)


def _call(node: Any, gradients: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    if callable(node):
        results = node(*gradients)
        return results if isinstance(results, tuple) else (results,)
    results = node.apply(*gradients)  # a torch.autograd.Function of a user's own: for each argument, tensor or not
    results = results if isinstance(results, tuple) else (results,)
    needed = iter([each for each, needs in zip(results, node.needs_input_grad, strict=False) if needs])
    return tuple(None if following is None else next(needed) for following, _ in node.next_functions)


def _fitted(gradient: Tensor, node: Any, at: int) -> Tensor:
    """Return a gradient in the shape and dtype of what it is the gradient of, as the engine sees to it."""
    there = metadata_of(node)[at]
    if gradient.shape != there.shape:
        gradient = gradient.sum_to_size(there.shape)
    return gradient if gradient.dtype == there.dtype else gradient.to(there.dtype)
