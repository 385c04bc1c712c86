"""Who observes an optimizer's steps, and gradients that torch's fused ones do not take."""

import torch
from torch.optim import SGD, Optimizer
from torch.optim import optimizer as optimizers

from ddp_recipes._compat.autograd import is_profiled


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


def note_step(optimizer: Optimizer) -> None:
    """Have schedulers know that a step was due, though a loss scaler may have skipped it: ``Optimizer._opt_called``.

    Else torch warns of a step that was forgotten where the first one overflows.
    """
    optimizer._opt_called = True  # type: ignore[attr-defined]


def ready_for_late_gradients(optimizer: Optimizer) -> None:
    """Let a fused optimizer take gradients that came later than others, or that are sparse.

    torch's fused SGD takes momentum of all parameters or of none; without any it would begin with the gradient, which
    is what comes of zeros, too. No fused one takes sparse gradients; momentum of theirs is dense then, which can be
    saved. Any other optimizer is left as it is.
    """
    state, groups = optimizer.state, optimizer.param_groups
    if len(state) == sum(len(group["params"]) for group in groups):
        return
    for group in groups:
        trained = [parameter for parameter in group["params"] if parameter.grad is not None]
        late = [parameter for parameter in trained if parameter not in state]
        sparse = [parameter for parameter in late if parameter.grad.is_sparse]
        if group.get("fused") and sparse:
            group["fused"] = False
        if not isinstance(optimizer, SGD) or not group["momentum"] or group["dampening"]:
            continue
        for parameter in late if group["fused"] and len(late) < len(trained) else sparse:
            state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
