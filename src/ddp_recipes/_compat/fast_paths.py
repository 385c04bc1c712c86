"""What torch keeps private of its engine, its profiler, and the steps of its optimizers, for shorter ways to them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable, profiler
from torch.optim import SGD, Adam, AdamW, Optimizer, optimizer as optimizers


def run_backward(loss: Tensor) -> None:
    """Add a scalar loss's gradients to those that are there: ``Variable._execution_engine``, or ``Tensor.backward``."""
    engine = getattr(Variable, "_execution_engine", None)
    if engine is None:
        loss.backward()  # type: ignore[no-untyped-call]
        return
    gradient = torch.ones_like(loss)
    engine.run_backward((loss,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def is_profiled() -> bool:
    """Whether a profiler is at work: ``torch.autograd.profiler._is_profiler_enabled``; without it, yes."""
    return bool(getattr(profiler, "_is_profiler_enabled", True))


def is_observed(optimizer: Optimizer) -> bool:
    """Whether something observes an optimizer's steps: its own hooks, those of all optimizers, a profiler.

    ``_optimizer_step_…_hooks`` and ``_global_optimizer_…_hooks``. One that another version does not have counts as yes:
    then ``Optimizer.profile_hook_step`` decides.
    """
    return bool(
        getattr(optimizer, "_optimizer_step_pre_hooks", True)
        or getattr(optimizer, "_optimizer_step_post_hooks", True)
        or getattr(optimizers, "_global_optimizer_pre_hooks", True)
        or getattr(optimizers, "_global_optimizer_post_hooks", True)
        or is_profiled()
    )


def has_fused_step(kind: type[Optimizer]) -> bool:
    """Whether :func:`fused_step` knows these optimizers."""
    kernels = ("_fused_sgd_", "_fused_adam_", "_fused_adamw_")
    return kind in (SGD, Adam, AdamW) and all(hasattr(torch, name) for name in kernels)


def fused_step(optimizer: Optimizer) -> bool:
    """Take the step of a fused optimizer by its kernel alone, ``torch._fused_sgd_`` and so on.

    Returns:
        Whether it was taken. torch has to where the optimizer has not begun or is not fused, and for all but plain
        tensors of one dtype on the host.
    """
    if getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None:
        return False
    groups = [(group, _fused_lists(group, optimizer.state)) for group in optimizer.param_groups]
    if any(lists is None for _, lists in groups):
        return False
    for group, lists in groups:
        if lists and lists[0]:
            (_fused_adam if "betas" in group else _fused_sgd)(group, lists)
    return True


def _fused_lists(group: Mapping[str, Any], state: Mapping[Tensor, Any]) -> list[list[Any]] | None:
    """Return the parameters of a group that have gradients, these, and what is kept of them, or ``None``."""
    trained = [each for each in group["params"] if each.grad is not None]
    gradients = [each.grad for each in trained]
    dtype = trained[0].dtype if trained else None
    for each in gradients:
        if not (type(each) is Tensor and each.dtype is dtype and each.is_cpu and not each.is_sparse):
            return None
    if not group["fused"] or type(group["lr"]) is not float:
        return None
    names: tuple[str, ...] = ("momentum_buffer",)
    if "betas" in group:
        names = ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")[: 4 if group["amsgrad"] else 3]
    elif not group["momentum"]:
        return [trained, gradients]
    try:
        return [trained, gradients, *([state.get(each, {})[name] for each in trained] for name in names)]
    except KeyError:  # it has not begun
        return None


def _fused_sgd(group: Mapping[str, Any], lists: list[list[Tensor]]) -> None:
    torch._fused_sgd_(
        lists[0],
        lists[1],
        lists[2] if group["momentum"] else [],
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        lr=group["lr"],
        dampening=group["dampening"],
        nesterov=group["nesterov"],
        maximize=group["maximize"],
        is_first_step=False,
    )


def _fused_adam(group: Mapping[str, Any], lists: list[list[Tensor]]) -> None:
    parameters, gradients, steps, average, square, *largest = lists
    torch._foreach_add_(steps, 1)
    (torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_)(
        parameters,
        gradients,
        average,
        square,
        largest[0] if largest else [],
        steps,
        lr=group["lr"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=group["amsgrad"],
        maximize=group["maximize"],
    )
