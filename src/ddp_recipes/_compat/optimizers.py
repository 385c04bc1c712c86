"""Who observes an optimizer's steps."""

from torch.optim import Optimizer
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
