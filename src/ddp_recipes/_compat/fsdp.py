"""Process groups of a model that ``fully_shard`` has dealt, in which others take their places; and late reductions.

There is no public way: a mesh and what FSDP2 makes of it hold the groups that they were made of. And FSDP2 reduces
gradients after each use of a block that gives its inputs gradients, or where there was none at the end.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from inspect import signature
from traceback import walk_tb
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from ddp_recipes._compat.torch_ import tree_leaves

_DATA: Any = Tensor.data
_GRAD: Any = torch.autograd.grad
_ADD_NODE: Any = FSDPParamGroup._register_post_backward_hook
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
        if hasattr(group.comm_ctx, "reduce_scatter_states"):
            group.comm_ctx.reduce_scatter_states.clear()
        else:  # up to torch 2.10 there is one
            group.comm_ctx.reduce_scatter_state = None


def tell_managed(model: nn.Module, managed: bool) -> None:
    """Have a model's modules say whether FSDP manages them, as ``fully_shard`` has them do.

    Hugging Face's ask it: ``generate`` then goes on until all ranks are done, which evaluations need. But in training
    those with ``layerdrop`` then drop no layer at all.
    """
    for module in model.modules():
        if hasattr(module, "_is_fsdp_managed_module"):
            module._is_fsdp_managed_module = cast(Any, managed)


def leave_graph_alone() -> None:
    """Have FSDP2 notice by hooks that a block's backward pass is over, where it puts a node before the block's inputs.

    At such a node the gradients of all uses of a tensor in the block would be added up, and then to those of its uses
    elsewhere: with three uses or more (what an encoder gives, to each layer of a decoder) in another order than without
    blocks. The engine runs what was made last first. So once it comes to what gave one of the inputs, all that was made
    in the block has run.
    """
    cast(Any, FSDPParamGroup)._register_post_backward_hook = _watch_for_end


def replaced(block: FSDPModule) -> Iterator[str]:
    """Yield the names of parameters, in their modules, that are neither the sharded nor the gathered ones.

    FSDP2 would put its own in their place, whatever is there: ``FSDPParam.to_unsharded``.
    """
    for group in _groups([block]):
        for each in group.fsdp_params:
            now = each._module_info.module._parameters.get(each._module_info.param_name)
            if now is not each.sharded_param and now is not getattr(each, "_unsharded_param", None):
                yield each._module_info.param_name


def note_call(block: FSDPModule, again: bool) -> None:
    """Say before a block is called whether it was in this pass: its backward pass is over when that of the first is.

    What one call gives may be what the next is called with: its maker would end the one and begin the other.
    """
    for group in _groups([block]):
        group.called_again = again


def _watch_for_end(group: Any, args: Any, kwargs: Any) -> Any:
    if not torch.is_grad_enabled() or getattr(group, "called_again", False):
        return args, kwargs
    inputs: list[Any] = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    made = [each for each in inputs if each.requires_grad and each.grad_fn is not None]
    if not made:  # nothing has made them: a checkpoint's copies, say
        return _ADD_NODE(group, args, kwargs)
    ended = False

    def end(_: Any) -> None:
        nonlocal ended
        if not ended and (group.reduce_grads or group.reshard_after_backward):  # else it is not the step's own pass
            ended = True
            group.post_backward()

    if not in_backward():  # else activations are computed again, and nothing goes back through these
        for each in made:
            _register_first_hook(each, end)
            each.grad_fn.register_prehook(end)  # also where this one of all that it gave gets no gradient
    return args, kwargs


def _register_first_hook(tensor: Any, hook: Callable[[Any], None]) -> None:
    """Register a hook that comes before the others: in one of them FSDP2 gathers the block that gave the tensor."""
    others = dict(tensor._backward_hooks or {})
    if others:
        tensor._backward_hooks.clear()  # autograd goes by when each was put there, whatever an OrderedDict says
    tensor.register_hook(hook)
    tensor._backward_hooks.update(others)


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
        torch.autograd.graph.increment_version(tensor)  # as a write to it does
    else:
        _DATA.__set__(tensor, value)


def _groups(blocks: Sequence[FSDPModule]) -> Iterator[Any]:
    for block in blocks:
        state = cast(Any, block)._get_fsdp_state()
        if hasattr(state, "_fsdp_param_groups"):
            yield from state._fsdp_param_groups
        elif state._fsdp_param_group is not None:  # up to torch 2.10 there is one, where there are parameters
            yield state._fsdp_param_group


def in_backward() -> bool:
    """Whether the engine runs a backward pass: ``torch._C._current_graph_task_id``. No public way."""
    return torch._C._current_graph_task_id() != -1


def gradient_hooks(tensor: Tensor) -> list[Callable[[Tensor], Tensor | None]]:
    """Return what ``Tensor.register_hook`` was given: ``Tensor._backward_hooks``. No public way."""
    return list((tensor._backward_hooks or {}).values())


def is_wrapped(tensor: Tensor) -> bool:
    """Whether a tensor is one of a transform of ``torch.func`` (``vmap``, ``jvp``), which has no memory of its own.

    Dynamo traces the hooks of blocks within what a model has compiled by itself, and would warn of this.
    """
    return not torch.compiler.is_compiling() and torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def uses_rows(error: BaseException) -> bool:
    """Whether an operation got a ``DTensor``, maybe beside a plain one: a parameter that is not gathered."""
    return any(each in str(error) for each in ("got mixed torch.Tensor and DTensor", "Sharding propagation failed"))


def refuse_rows() -> None:
    """Have ``torch.autograd.grad`` fail where it is asked for the gradient of a parameter that is not gathered.

    With ``allow_unused`` it would return ``None``, and a step on what it returns (MAML) would be left out.
    """
    if torch.autograd.grad is not _GRAD:
        return

    own = signature(_GRAD)

    @wraps(_GRAD)
    def grad(*args: Any, **kwargs: Any) -> Any:
        given = own.bind(*args, **kwargs)
        if any(isinstance(each, DTensor) for each in tree_leaves(given.arguments["inputs"])):
            given.arguments["allow_unused"] = False
        return _GRAD(*given.args, **given.kwargs)

    torch.autograd.grad = grad


def asks_rows(error: BaseException) -> bool:
    """Whether ``torch.autograd.grad`` was asked for the gradient of a parameter that is not gathered."""
    frames = (frame for frame, _ in walk_tb(error.__traceback__) if frame.f_code is _GRAD.__code__)
    return any(isinstance(each, DTensor) for frame in frames for each in tree_leaves(frame.f_locals["inputs"]))


def of_freed_memory(error: BaseException) -> bool:
    """Whether an operation got a tensor whose memory has been freed, as that of a parameter that is given back."""
    return isinstance(error, RuntimeError) and "storage of size 0" in str(error)


def of_two_dtypes(error: BaseException) -> bool:
    """Whether an operation got tensors of two types, as linear layers and convolutions say it."""
    text = r"must have the same dtype|should be the same|expected scalar type|mixed dtype"
    return isinstance(error, RuntimeError) and re.search(text, str(error)) is not None
