"""Which collectives a piece of code calls, and how torch names groups.

torch documents ``TorchDispatchMode`` by this name; there is no public way for it. Nor is there one to have a group that
did not come about not count: the count is in the names under which ranks look for each other. Nor to list all groups,
nor to get what the flight recorder has without a file that torch names by itself.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d
from torch.distributed import ProcessGroup, distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class OnCollective(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls ``found`` with the name and the tensors of each collective of ``torch.distributed`` before it runs."""

    def __init__(self, found: Callable[[str, Sequence[Tensor]], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.found(func.name(), [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)])
        return func(*args, **(kwargs or {}))


def all_gather_single(into: Tensor, mine: Tensor, group: ProcessGroup | None = None) -> None:
    """Gather a tensor of each rank into one; torch 2.14 gave this its name, and warns of the one before."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(into, mine, group=group)


def reduce_scatter_single(into: Tensor, all_: Tensor, group: ProcessGroup, op: Any) -> None:
    """Reduce a tensor of each rank, and leave each its part; torch 2.14 gave this its name."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(into, all_, group=group, op=op)


def count_groups_anew() -> None:
    """Have the next process group be named as the first, which it is to a process that was started meanwhile."""
    distributed_c10d._world.group_count = 0


def every_group() -> list[ProcessGroup]:
    """Return all process groups of this process."""
    return list(distributed_c10d._world.pg_names)


def record_collectives() -> list[object]:
    """Have the flight recorder note the collectives of all groups, as long as what this returns is kept.

    gloo and the earlier NCCL do by themselves; the one that torch has by default from 2.15 on does not.
    """
    hook = getattr(_distributed_c10d, "FlightRecorderHook", None)
    return [] if hook is None else [hook.attach(group) for group in every_group()]


def recorded_collectives() -> bytes:
    """Return what the flight recorder has of this process's last collectives, as JSON; nothing where there is none.

    The earlier NCCL has a recorder of its own.
    """
    names = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
    found = [getattr(_distributed_c10d, name)() for name in names if hasattr(_distributed_c10d, name)]
    return max((each for each in found if json.loads(each).get("entries")), key=len, default=b"")
