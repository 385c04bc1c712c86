"""Process groups of a model that ``fully_shard`` has dealt, in which others take their places; and late reductions.

There is no public way: a mesh and what FSDP2 makes of it hold the groups that they were made of. And FSDP2 reduces
gradients after each use of a block that gives its inputs gradients, or where there was none at the end.
"""

from collections.abc import Iterator, Sequence
from typing import Any, cast

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

_DATA: Any = Tensor.data
LEAVES = hasattr(FSDPModule, "reset_iter_state")  # from torch 2.15 on: a pass that was cut off can be forgotten


def leave(blocks: Sequence[FSDPModule], mesh: DeviceMesh) -> None:
    """Forget what was under way, and the groups of the mesh that the blocks, the model first, were dealt to."""
    for group in _groups(blocks):
        group._all_gather_result = None  # else it is waited for
        for parameter in group.fsdp_params:  # what a backward pass has left, which the next one would add to
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None
        group.mesh_info.shard_process_group = group.mesh_info.replicate_process_group = None
    if cast(Any, blocks[0])._get_fsdp_state()._is_root:  # it has run
        blocks[0].reset_iter_state()
    cast(Any, mesh)._pg_registry.clear()


def set_groups(blocks: Sequence[FSDPModule], mesh: DeviceMesh, other: DeviceMesh) -> None:
    """Put the groups of another mesh of the same ranks in the places of those that the blocks were dealt to."""
    vars(mesh).update(vars(other))  # tensors refer to it
    for group in _groups(blocks):
        group.mesh_info.__post_init__()


def reduce_now(blocks: Sequence[FSDPModule]) -> None:
    """Reduce what backward has left of blocks' gradients, as FSDP2 does by itself where it may: ``post_backward``."""
    for group in _groups(blocks):
        group.post_backward()
        group._training_state = type(group._training_state).IDLE
        group.finalize_backward()  # has the device wait, too
        group.comm_ctx.reduce_scatter_states.clear()


def keep_assigned_data() -> None:
    """Have ``parameter.data = value`` write to the rows that a rank holds of a parameter.

    A ``DTensor`` is made of another tensor, and torch leaves that one alone: what is assigned is lost (moving averages
    are often kept so).
    """
    if not isinstance(vars(DTensor).get("data"), property):
        DTensor.data = property(_DATA.__get__, _assign)  # type: ignore[assignment]


def _assign(tensor: Any, value: Any) -> None:
    if isinstance(value, DTensor) and (value.placements, value.dtype) == (tensor.placements, tensor.dtype):
        tensor._local_tensor.detach().copy_(value._local_tensor)
    else:
        _DATA.__set__(tensor, value)


def _groups(blocks: Sequence[FSDPModule]) -> Iterator[Any]:
    for block in blocks:
        yield from cast(Any, block)._get_fsdp_state()._fsdp_param_groups
