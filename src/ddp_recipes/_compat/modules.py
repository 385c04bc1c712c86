"""What ``nn.Module`` holds, and base classes of its kinds."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

# ``nn.modules.batchnorm._BatchNorm``, or the public classes that are made of it.
BatchNorm: Any = getattr(
    nn.modules.batchnorm, "_BatchNorm", (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
)

# ``nn.modules.batchnorm._NormBase``: what keeps running statistics, those and instance norms.
NormBase: Any = getattr(
    nn.modules.batchnorm, "_NormBase", (BatchNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
)

# ``nn.modules.dropout._DropoutNd``, or the public classes that are made of it.
Dropout: Any = getattr(
    nn.modules.dropout,
    "_DropoutNd",
    (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout),
)


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Return where a module keeps its own buffers, to read and to write: ``Module._buffers``.

    ``named_buffers(recurse=False)`` is no way around it: it leaves out what is ``None``, and cannot be written to.
    """
    return module._buffers


def gradient_hooks(tensor: Tensor) -> list[Callable[[Tensor], Tensor | None]]:
    """Return what ``Tensor.register_hook`` was given: ``Tensor._backward_hooks``. No public way."""
    return list((tensor._backward_hooks or {}).values())


def share_tensors(module: nn.Module, copied: nn.Module) -> None:
    """Give a copy of a module the very parameters and buffers of its own: ``Module._parameters``, ``_buffers``.

    Attributes are no way around it: to set one that a user's module makes a property of calls that.
    """
    copied._parameters.update(module._parameters)
    copied._buffers.update(module._buffers)


def apply_to_own(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Change a module's own parameters and buffers, and not those of the modules in it: ``Module._apply``.

    Modules override it that keep more than these (``nn.LSTM``). There is no public way: ``Module.to``, which is made of
    it, goes into the modules inside.
    """
    module._apply(change, recurse=False)  # type: ignore[no-untyped-call]


def move_own(module: nn.Module, device: torch.device) -> None:
    """Put a module's own parameters and buffers on a device of any kind; parameters stay the same objects.

    ``swap_tensors`` alone refuses weights to which there are weak references, which ``nn.LSTM`` has. Its ``_apply``
    lets go of them for as long as that takes.
    """
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        apply_to_own(module, partial(Tensor.to, device=device))
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)


def remove_forward_pre_hooks(module: nn.Module, chosen: Callable[[Any], bool]) -> None:
    """Remove some hooks: ``Module._forward_pre_hooks``. In public, only who has kept a hook's handle can."""
    for number, hook in list(module._forward_pre_hooks.items()):
        if chosen(hook):
            del module._forward_pre_hooks[number]
            module._forward_pre_hooks_with_kwargs.pop(number, None)
