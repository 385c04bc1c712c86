"""Each rank's part of the model's parameters, and how the whole comes of parts."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ddp_recipes._compat.torch_ import local
from ddp_recipes.runtime.tensors import OwnRows, span, take_attributes
from ddp_recipes.strategies.exchanges import exchanged


@dataclass
class Part:
    """What this rank updates of a parameter.

    Attributes:
        name: the parameter's.
        whole: the parameter as FSDP2 has it, a ``DTensor``.
        own: the rows that are here, a plain parameter in the same memory: for optimizers, whose fused kernels take no
            ``DTensor``.
    """

    name: str
    whole: nn.Parameter
    own: nn.Parameter

    @classmethod
    def of(cls, name: str, parameter: nn.Parameter) -> "Part":
        """Return this rank's part of a parameter, with the attributes that code has given it."""
        own = nn.Parameter(local(parameter), requires_grad=parameter.requires_grad)
        take_attributes(own, parameter)  # by which optimizers choose: a learning rate of its own, no weight decay
        return cls(name, parameter, own)

    def take_gradient(self, used: bool) -> None:
        """Give the optimizer's parameter the gradient, too, if the model ``used`` it."""
        self.own.data = local(self.whole)  # which FSDP2 may put elsewhere, at the first step
        self.own.grad = local(self.whole.grad) if used and self.whole.grad is not None else None
        self.whole.grad = self.whole.grad if used else None


_TENSOR: Any = Tensor
_SIZES = (
    *(_TENSOR.shape.__get__, _TENSOR.size, _TENSOR.__len__),
    *(_TENSOR.numel, torch.numel, _TENSOR.nelement, _TENSOR.nbytes.__get__),
)


class WholeSizes(TorchFunctionMode):
    """Shows the sizes of whole parameters to code that asks for those of a rank's rows, to put them into groups."""

    def __init__(self, parts: Iterable[Part]) -> None:
        super().__init__()
        self.wholes = {id(part.own): part.whole for part in parts}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _SIZES and id(args[0]) in self.wholes:
            args = (self.wholes[id(args[0])], *args[1:])
        return func(*args, **kwargs or {})


def own_rows(values: Tensor, whole: Tensor) -> Tensor | OwnRows:
    """Return what this rank has of a tensor that is dealt, or is dealt as ``whole``; any other one as it is."""
    mesh = getattr(whole, "device_mesh", None)
    if mesh is None:
        return values
    start, _ = span(whole.shape[0], mesh.get_coordinate()[-1], mesh.size(-1))
    return OwnRows(values.detach(), start, whole.shape)


def joined(own: Tensor, shape: Sequence[int], group: dist.ProcessGroup) -> Tensor | None:
    """Return the whole of all ranks' parts on the first rank of a group, ``None`` elsewhere. A collective."""
    each = -(-shape[0] // group.size())
    padded = own.new_zeros(each, *shape[1:])
    padded[: len(own)] = own
    whole = own.new_empty(group.size() * each, *shape[1:]) if group.rank() == 0 else None
    rows = None if whole is None else list(torch.split(whole, each))
    exchanged(dist.gather, padded, rows, group=group, group_dst=0)
    return None if whole is None else whole[: shape[0]]


def own_of(gradients: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Return gradients as dealt to a group, [rows, ...] each: a single number, which each rank has, is the first's."""
    return [each if each.dim() else each.view(1)[: int(group.rank() == 0)] for each in gradients]


def norms(own: Sequence[Tensor], sizes: Sequence[Sequence[int]], group: dist.ProcessGroup) -> Tensor:
    """Return the norm of each whole tensor, [tensors], to the bit as of one that is in one place. A collective.

    Each is put together on one rank, in turns; as bytes, for they may be of several dtypes.

    Args:
        own: this rank's rows of them, of shapes ``sizes`` as wholes.
    """
    rank, ranks = group.rank(), group.size()
    dtype = reduce(torch.promote_types, {each.dtype for each in own})
    found = own[0].new_zeros(-(-len(own) // ranks) * ranks, dtype=dtype)
    for start in range(0, len(own), ranks):
        mine = start + rank
        sent = [each.reshape(-1).view(torch.uint8).to(found.device) for each in own[start : start + ranks]]
        sent += [sent[0][:0]] * (ranks - len(sent))
        like, shape = (own[mine], sizes[mine]) if mine < len(own) else (own[0], [0])
        rows = [stop - start for start, stop in (span(shape[0], each, ranks) for each in range(ranks))]
        of_row = torch.Size(shape[1:]).numel() * like.itemsize
        received = sent[0].new_empty(shape[0] * of_row)
        sizes_received, sizes_sent = [each * of_row for each in rows], list(map(len, sent))
        exchanged(dist.all_to_all_single, received, torch.cat(sent), sizes_received, sizes_sent, group=group)
        if mine < len(own):
            found[mine] = torch.linalg.vector_norm(received.view(like.dtype).view(*shape))
    exchanged(dist.all_reduce, found, group=group)
    return found[: len(own)]
