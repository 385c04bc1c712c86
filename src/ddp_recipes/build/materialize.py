"""Memory and values for a task's tensors, of which some have none yet, or only some rows here."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ddp_recipes._compat.torch_ import local
from ddp_recipes.runtime.phases import CALLS
from ddp_recipes.runtime.tensors import Source, rows_here
from ddp_recipes.tasks import Task
from ddp_recipes.tasks.task import outside


@torch.no_grad()
def materialize(task: Task, initial: Mapping[str, Source], weights: Mapping[str, Any], device: torch.device) -> None:
    """Give all tensors of a task memory on a device, and values, one after the other.

    Args:
        initial: by the names of :meth:`Task.weights`, and of other buffers likewise. A tensor that is not in it keeps
            its values.
        weights: come before these, under any name of a tensor that has several.
    """
    tensors: dict[int, Tensor] = {}
    places: dict[int, list[tuple[nn.Module, str, str]]] = {}
    for prefix, module in task.named_modules():
        own = [*module.named_parameters(recurse=False, remove_duplicate=False)]
        for name, tensor in (*own, *module.named_buffers(recurse=False, remove_duplicate=False)):
            tensors[id(tensor)] = tensor
            places.setdefault(id(tensor), []).append((module, name, outside(f"{prefix}.{name}".removeprefix("."))))
    dealt = [each for each in tensors.values() if hasattr(each, "device_mesh")]
    home = next((each.device for each in dealt if not each.is_meta), device)  # rows may be elsewhere than what runs
    with CALLS.with_large_memory():
        for key, tensor in tensors.items():
            names = [name for *_, name in places[key]]
            values = [given[name] for given in (initial, weights) for name in names if name in given]
            where = home if hasattr(tensor, "device_mesh") else device
            filled = _filled(tensor, values[-1] if values else None, where)
            if filled is not tensor:
                for module, name, _ in places[key]:
                    setattr(module, name, filled)
    task.deferred = False
    others = {name: weights[outside(name)] for name in task.state_dict() if outside(name) in weights}
    others = {name: value for name, value in others.items() if name.endswith("_extra_state")}
    task.load_state_dict(others, strict=False)  # after which FSDP2 looks at parameters again


def _filled(tensor: Tensor, value: Tensor | Source | None, device: torch.device) -> Tensor:
    """Return a tensor, or another one in its place, with a value."""
    filled = tensor
    if tensor.is_meta or tensor.device != device:
        filled = torch.empty_like(tensor, device=device)
        if isinstance(tensor, nn.Parameter):
            filled = nn.Parameter(filled, requires_grad=tensor.requires_grad)
    if value is not None:
        local(filled).copy_(rows_here(value, tensor))
    elif filled is not tensor:
        local(filled).copy_(local(tensor))
    return filled
