"""Blocks whose activations are computed again in backward instead of kept: ``model.activation_checkpointing``."""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ddp_recipes.errors import RequestError
from ddp_recipes.model_parallel.blocks import named, on_copies, repeated


def recompute(model: nn.Module, chosen: bool | str | Sequence[str]) -> None:
    """Have blocks keep what they are called with alone (Chen et al., "Training Deep Nets with Sublinear Memory", 2016).

    Weights are the same bits: random numbers are drawn again, and buffers move once.

    Args:
        chosen: true for the elements of every list of blocks, or patterns of modules' names.

    Raises:
        RequestError: there is no such block.
    """
    names = repeated(model) if isinstance(chosen, bool) else named(model, chosen, "model.activation_checkpointing")
    if not names:
        raise RequestError(
            f"model.activation_checkpointing=true takes the elements of nn.Sequential and nn.ModuleList, and "
            f"{type(model).__name__} has none with parameters. Name its blocks: "
            f"{', '.join(name for name, _ in model.named_children()) or 'it has no modules in it'}."
        )
    for name in names:
        block = model.get_submodule(name)
        kind: Any = type(block)
        block.__class__ = _recomputed(kind)


@cache
def _recomputed(base: Any) -> Any:
    """Return the class with another ``forward``: unlike one of an instance it is copied with the module."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = partial(base.forward, self)
        if not torch.is_grad_enabled():
            return own(*args, **kwargs)
        return checkpoint(own, *args, use_reentrant=False, context_fn=partial(_contexts, self), **kwargs)

    return type(base.__name__, (base,), {"forward": forward, "__module__": base.__module__})


def _contexts(block: nn.Module) -> tuple[Any, Any]:
    return nullcontext(), on_copies(block)
