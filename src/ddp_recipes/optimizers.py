"""torch's own optimizers without its compiler, which loads with the first of them and has a say in each step."""

import inspect
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

T = TypeVar("T")


def uncompiled(target: T) -> T:
    """Return an optimizer class of torch's with methods that leave ``torch._dynamo`` alone; anything else as it is.

    They are wrapped for callers that are compiled, which the loop is not: loading the compiler takes longer than all
    of a short run's own work, and entering and leaving it in each step longer than the step of a small model. Hooks
    that a user registers are called as ever, and a state dict is the same.
    """
    ours = isinstance(target, type) and issubclass(target, Optimizer) and target.__module__.startswith("torch.optim.")
    return _subclass(target) if ours else target


@cache
def _subclass(base: type[Optimizer]) -> Any:
    names = ("add_param_group", "load_state_dict", "state_dict")
    members = {name: inspect.unwrap(getattr(base, name)) for name in names}
    return type(base.__name__, (base,), {**members, "step": _eager(inspect.unwrap(base.step)), "__doc__": base.__doc__})


def _eager(step: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(step)
    def eager(self: Optimizer, *arguments: Any, **options: Any) -> Any:
        with torch.set_grad_enabled(self.defaults.get("differentiable", False)):
            return step(self, *arguments, **options)

    return eager
