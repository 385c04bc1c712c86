"""Steps that a model brings itself, as those written for Lightning do."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method

from ddp_recipes.strategies.fsdp.calls import apart, watch_of_gathered

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def own_steps(model: nn.Module) -> list[str]:
    """Return the names of the steps that a model has."""
    return [name for name in _STEPS if hasattr(model, name)]


def gather_in_steps(model: nn.Module, done: Callable[[], None]) -> None:
    """Have what is in no block gathered for a step as for a call: a step need not call the model itself.

    Args:
        done: called after each step.
    """
    for name in own_steps(model):
        own = getattr(model, name)
        setattr(model, name, _watched(model, own))
        register_fsdp_forward_method(model, name)
        setattr(model, name, _followed(model, own, getattr(model, name), done))


def _watched(model: nn.Module, own: Callable[..., Any]) -> Callable[..., Any]:
    watch = watch_of_gathered(model)

    @wraps(own)
    def step(*args: Any, **kwargs: Any) -> Any:
        with watch.one():
            return own(*args, **kwargs)

    return step


def _followed(model: nn.Module, own: Any, gathered: Callable[..., Any], done: Callable[[], None]) -> Callable[..., Any]:
    @wraps(own)  # for who asks what it takes
    def step(*args: Any, **kwargs: Any) -> Any:
        output = apart(model, gathered(*args, **kwargs))
        done()
        return output

    return step
