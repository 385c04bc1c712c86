"""torch's own optimizers without what they do for its compiler and its profiler, unless one of them is at work."""

import inspect
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, TypeVar

import torch
from torch.autograd import profiler
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers

T = TypeVar("T")


def uncompiled(target: T) -> T:
    """Return an optimizer class of torch's with methods that leave ``torch._dynamo`` alone; anything else as it is.

    They are wrapped for callers that are compiled, which the loop is not: loading the compiler takes longer than all
    of a short run's own work, and telling it and the profiler of each step as long as the step of a small model. Hooks
    that a user registers are called as ever, a profiler sees the same ranges, and a state dict is the same.
    """
    ours = isinstance(target, type) and issubclass(target, Optimizer) and target.__module__.startswith("torch.optim.")
    return _subclass(target) if ours else target


@cache
def _subclass(base: type[Optimizer]) -> Any:
    names = ("add_param_group", "load_state_dict", "state_dict")
    members = {name: inspect.unwrap(getattr(base, name)) for name in names}
    return type(base.__name__, (base,), {**members, "step": _step(inspect.unwrap(base.step)), "__doc__": base.__doc__})


def _step(step: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(step)
    def alone(self: Optimizer, *arguments: Any, **options: Any) -> Any:
        with torch.set_grad_enabled(self.defaults.get("differentiable", False)):
            return step(self, *arguments, **options)

    told = Optimizer.profile_hook_step(alone)

    @wraps(step)
    def stepped(self: Optimizer, *arguments: Any, **options: Any) -> Any:
        return (told if _is_observed(self) else alone)(self, *arguments, **options)

    stepped.hooked = True  # type: ignore[attr-defined]  # torch's mark for what it need not wrap again
    return stepped


def _is_observed(optimizer: Optimizer) -> bool:
    """Whether somebody wants to be told of steps. What another version of torch does not have counts as yes."""
    return bool(
        getattr(optimizer, "_optimizer_step_pre_hooks", True)
        or getattr(optimizer, "_optimizer_step_post_hooks", True)
        or getattr(optimizers, "_global_optimizer_pre_hooks", True)
        or getattr(optimizers, "_global_optimizer_post_hooks", True)
        or getattr(profiler, "_is_profiler_enabled", True)
    )
