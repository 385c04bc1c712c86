"""Shorter ways to what torch does: the same bits, less time. ``trainer.fast_paths=false`` turns all of them off.

What is slow is what torch asks first, of its compiler, its profiler and its debug log; where one of them is at work,
and for tensors and optimizers not of torch's own classes, it is asked. ``benchmarks/fast_paths.py`` shows the gains.
"""

import inspect
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import graph
from torch.optim import Optimizer

from ddp_recipes._compat.fast_paths import fused_step as fused_step, has_fused_step, is_observed, run_backward
from ddp_recipes._compat.torch_ import ready_for_late_gradients
from ddp_recipes.runtime.phases import CALLS

T = TypeVar("T")

_enabled = True


def enable(on: bool) -> None:
    """Take the fast paths from now on in this process, or torch's own."""
    global _enabled
    _enabled = on
    CALLS.backward, CALLS.zero_grad, CALLS.made_of = backward, zero_grad, uncompiled
    CALLS.with_large_memory = freed_memory_given_back


def set_up(on: bool, host: bool) -> None:
    """Do what ``trainer.fast_paths`` says, and on the host keep memory that one step frees for the next."""
    enable(on)
    if host:
        keep_freed_memory()


def backward(loss: Tensor) -> None:
    """Run backward; on the CPU a scalar goes straight to torch's engine.

    ``Tensor.backward`` comes to it by way of what tensor subclasses, GPU threads and its own debug log need.
    """
    plain = type(loss) is Tensor and loss.is_cpu and loss.dim() == 0 and loss.is_floating_point()
    if not (_enabled and plain) or graph.log.isEnabledFor(logging.DEBUG):
        loss.backward()  # type: ignore[no-untyped-call]
        return
    run_backward(loss)


def zero_grad(optimizer: Optimizer) -> None:
    """Set gradients to None. torch asks the compiler and the profiler first, which takes longer."""
    if not _enabled or type(optimizer).zero_grad is not Optimizer.zero_grad:
        optimizer.zero_grad()
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def uncompiled(target: T) -> T:
    """Return an optimizer class of torch's with methods that leave ``torch._dynamo`` alone; anything else as it is.

    They are wrapped for callers that are compiled, which the loop is not, and load the compiler. Hooks that a user
    registers are called as ever, a profiler sees the same ranges, and a state dict is the same. A pickle or a deep copy
    of such an optimizer is one of torch's own class.
    """
    ours = isinstance(target, type) and issubclass(target, Optimizer) and target.__module__.startswith("torch.optim.")
    return _subclass(target) if _enabled and ours else target


@cache
def _subclass(base: type[Optimizer]) -> Any:
    def reduce(self: Optimizer, protocol: object) -> tuple[Any, ...]:
        return object.__new__, (base,), self.__getstate__()

    names = ("add_param_group", "load_state_dict", "state_dict")
    members = {name: inspect.unwrap(getattr(base, name)) for name in names}
    fused = has_fused_step(base)
    step = _step(inspect.unwrap(base.step), fused)
    members |= {"step": step, "takes_late_gradients": fused, "__reduce_ex__": reduce, "__doc__": base.__doc__}
    return type(base.__name__, (base,), members)


def _step(step: Callable[..., Any], fused: bool) -> Callable[..., Any]:
    @wraps(step)
    def alone(self: Optimizer, *arguments: Any, **options: Any) -> Any:
        with torch.set_grad_enabled(self.defaults.get("differentiable", False)):
            if fused and not arguments and not options:
                if fused_step(self):
                    return None
                ready_for_late_gradients(self)
            return step(self, *arguments, **options)

    observed = Optimizer.profile_hook_step(alone)

    @wraps(step)
    def stepped(self: Optimizer, *arguments: Any, **options: Any) -> Any:
        return (observed if is_observed(self) else alone)(self, *arguments, **options)

    stepped.hooked = True  # type: ignore[attr-defined]  # torch's mark for what it need not wrap again
    return stepped


def keep_freed_memory() -> None:
    """Keep memory that one step frees for the next. glibc would give it back, and the system fill it with zeros again.

    Nothing changes where the environment sets glibc's allocator up, or the C library is another one.
    """
    _set_allocator_up(-1, 32 << 20)  # never give back; and glibc allows no more


@contextmanager
def freed_memory_given_back() -> Iterator[None]:
    """Give large memory back at once: what stays would come to lie in its place, and the next would take new memory."""
    _set_allocator_up(128 << 10, 128 << 10)  # as when a process starts
    try:
        yield
    finally:
        keep_freed_memory()


def _set_allocator_up(trim_threshold: int, mmap_threshold: int) -> None:
    """Set how much free memory glibc keeps at its end, and what it takes from the system, and gives back, by itself."""
    import ctypes

    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    set_up = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"} & os.environ.keys()
    if _enabled and mallopt is not None and not set_up:
        mallopt(-1, trim_threshold)  # M_TRIM_THRESHOLD
        mallopt(-3, mmap_threshold)  # M_MMAP_THRESHOLD
