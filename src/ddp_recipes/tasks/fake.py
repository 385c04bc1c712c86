"""Tensors with shapes and devices but no data, of tasks and batches; and what a step on them shows."""

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from ddp_recipes._compat.dispatch import FakeTensorMode
from ddp_recipes.errors import RequestError
from ddp_recipes.runtime.tensors import change_each, is_dense, take_attributes
from ddp_recipes.tasks.task import Task


class Uncopied(RequestError):
    """Something in a task cannot be copied."""


def new_mode() -> FakeTensorMode:
    """Return what makes tensors without data."""
    # Autograd starts a thread for each device with its first backward pass, and then the process cannot be forked.
    # So that comes before the devices that do not exist: for them it would start one as well.
    torch.zeros((), requires_grad=True).backward()  # type: ignore[no-untyped-call]
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_batch(batch: Any, device: torch.device) -> Any:
    """Return a batch like this one, on a device, and without data in a mode that makes tensors without any.

    Raises:
        TypeError: it has a tensor whose shape is not all there is to know of it.
    """

    def fake(tensor: Tensor) -> Tensor:
        if not is_dense(tensor):
            raise TypeError(f"a batch has a {'nested' if tensor.is_nested else 'sparse'} tensor")
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)

    return change_each(batch, fake)


def without_data(
    task: Task, stages: Mapping[nn.Module, int], devices: Sequence[torch.device], mode: AbstractContextManager[Any]
) -> Task:
    """Return a copy of the task whose parameters and buffers are in their places, but have no data.

    Args:
        stages: for each module the number of its device; of those that are not in it the last one.
        mode: makes fake tensors of new ones; where all devices are ``meta`` none is needed.
    """
    memo: dict[int, Any] = {}
    with mode:
        for module in task.modules():
            for tensor in (
                *module.parameters(recurse=False),
                *module.buffers(recurse=False),
                *computed(module).values(),
            ):
                # Nothing of the tensor itself: weak references to it would stay.
                device = devices[stages.get(module, -1)]
                fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
                is_parameter = isinstance(tensor, nn.Parameter)
                memo[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
                if is_parameter:
                    take_attributes(memo[id(tensor)], tensor)
    return copied(task, memo)


def copied(task: Task, memo: dict[int, Any]) -> Task:
    """Return a copy of a task with other tensors in the places of its own.

    Raises:
        Uncopied: something in it cannot be copied.
    """
    try:
        return copy.deepcopy(task, memo)
    except Exception as error:
        reason = str(error).partition("\n")[0].partition(". ")[0]
        raise Uncopied(
            f"{type(task.model).__name__} cannot be copied ({reason}), and plan=true and pipelines run copies of a "
            f"model. Let it keep no lock, open file or tensor of an earlier pass; and a hook puts such into the module "
            f"that it is called with, not into the one that it was made in."
        ) from error


def computed(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's attributes that were computed of its parameters, as ``torch.nn.utils.weight_norm`` leaves them.

    They are computed anew in each forward pass; torch does not copy them, nor moves what they come of.
    """
    return {name: each for name, each in vars(module).items() if isinstance(each, Tensor) and not each.is_leaf}
