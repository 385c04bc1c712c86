"""What torch keeps private of autograd's graph, modules and messages, for a model over several devices or processes."""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ddp_recipes._compat.torch_ import apply_to_own


def current_node() -> Any:
    """Return the node whose backward runs, or ``None``: ``torch._C._current_autograd_node``. No public way."""
    return torch._C._current_autograd_node()


def current_checkpoint() -> Any:
    """Return what is of one call of a ``torch.utils.checkpoint`` alone (not a reentrant one), or ``None`` outside.

    That is what packs the tensors that autograd is to keep: ``torch._C._autograd._top_saved_tensors_default_hooks``. No
    public way.
    """
    pack, _ = torch._C._autograd._top_saved_tensors_default_hooks(True) or (None, None)
    return pack if getattr(pack, "__module__", "") == "torch.utils.checkpoint" else None


def next_sequence_number() -> int:
    """Return the number that the next node gets: ``torch._C._autograd._get_sequence_nr``. No public way."""
    return torch._C._autograd._get_sequence_nr()


def sequence_number(node: Any) -> int:
    """Return a node's number, which grows in the order of the forward pass: ``Node._sequence_nr``. No public way."""
    number: int = node._sequence_nr()
    return number


def metadata_of(node: Any) -> Any:
    """Return the shape and dtype of each of the outputs that a node is of: ``Node._input_metadata``. No public way."""
    return node._input_metadata


@contextmanager
def pass_numbered(number: int) -> Iterator[None]:
    """Give a backward pass that the engine does not run a number, as the engine does.

    ``torch.utils.checkpoint`` gets it from ``torch._C._current_graph_task_id``. No public way.
    """
    module: Any = torch._C
    original = module._current_graph_task_id
    module._current_graph_task_id = lambda: number
    try:
        yield
    finally:
        module._current_graph_task_id = original


def share_tensors(module: nn.Module, copied: nn.Module) -> None:
    """Give a copy of a module the very parameters and buffers of its own: ``Module._parameters``, ``_buffers``.

    Attributes are no way around it: to set one that a user's module makes a property of calls that.
    """
    copied._parameters.update(module._parameters)
    copied._buffers.update(module._buffers)


def move_own(module: nn.Module, device: torch.device) -> None:
    """Put a module's own parameters and buffers on a device of any kind; parameters stay the same objects.

    ``swap_tensors`` alone refuses weights to which there are weak references, which ``nn.LSTM`` has. Its ``_apply``
    frees these for as long as that takes.
    """
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        apply_to_own(module, partial(Tensor.to, device=device))
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether ``register_full_backward_hook`` has given a module any: ``Module._backward_hooks``. No public way."""
    return bool(module._backward_hooks)


def remove_forward_pre_hooks(module: nn.Module, chosen: Callable[[Any], bool]) -> None:
    """Remove some hooks: ``Module._forward_pre_hooks``. In public, only who has kept a hook's handle can."""
    for number, hook in list(module._forward_pre_hooks.items()):
        if chosen(hook):
            del module._forward_pre_hooks[number]
            module._forward_pre_hooks_with_kwargs.pop(number, None)


def wait_for_messages_by(wait: Callable[[Any], object]) -> None:
    """Have the schedules of torch's pipelines wait by this for each message between their stages."""
    from torch.distributed.pipelining import schedules

    def wait_for_all(handles: Iterable[Any]) -> None:
        for handle in handles:
            wait(handle)

    schedules._wait_batch_p2p = wait_for_all  # type: ignore[assignment]


def of_no_data(error: BaseException) -> bool:
    """Whether an operation got a tensor that has no data, on the device ``meta``, and data or their value were due."""
    return isinstance(error, RuntimeError) and re.search(r"device meta|meta tensor", str(error)) is not None


def stages_named(error: BaseException) -> set[int]:
    """Return the numbers of the devices that an error of an operation names."""
    return {int(number) for number in re.findall(r"\b[a-z]+:(\d+)", str(error))}
