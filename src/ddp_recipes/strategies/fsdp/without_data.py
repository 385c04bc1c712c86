"""Blocks of parameters that are gathered, reduced and given back without data; and calls in backward."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import Parameter

from ddp_recipes._compat.torch_ import tree_leaves, tree_map_only


class Block:
    """Parameters that are gathered together.

    Args:
        policy: in what they are gathered, and computed with.
        offload: whether a rank's rows are on the CPU.

    Attributes:
        parts: rank 0's rows of each parameter, the most that a rank has.
        part: bytes that a rank gives of its rows, padded to as many on each; ``trained`` those of their gradients.
        buffer: rows of all ranks as they arrive, ``gathers`` times by now; ``whole`` are parameters made of them.
        gradient: the rows that were reduced last.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Sequence[Parameter],
        ranks: int,
        policy: MixedPrecisionPolicy,
        offload: bool,
    ) -> None:
        self.module, self.ranks, self.policy, dtype = module, ranks, policy, policy.param_dtype
        self.parts: dict[Parameter, Parameter] = {}
        self.copied = offload or dtype is not None  # before it is sent
        self.part = self.trained = self.gathers = 0
        for each in parameters:
            padded = each.new_empty(-(-len(each) // ranks), *each.shape[1:], device="cpu" if offload else None)
            self.parts[each] = Parameter(padded[: len(each)], each.requires_grad)
            self.trained += padded.nbytes * each.requires_grad
            each.data = each.data.to(dtype) if dtype is not None and each.is_floating_point() else each.data
            self.part += padded.numel() * each.itemsize
        self.buffer: Tensor | None = None
        self.whole: list[Tensor] = []
        self.gradient: Tensor | None = None

    def gather(self) -> None:
        """Receive the rows of all ranks."""
        if not self.whole and self.buffer is None and self.parts:
            self.gathers += 1
            given = self._bytes(self.part if self.copied else 0)
            self.buffer = self._bytes(self.ranks * self.part if self.ranks > 1 else 0)
            del given
            self._copied(self.buffer)

    def take(self) -> Tensor | None:
        """Make parameters of what was received; return that."""
        received, self.buffer = self.buffer, None
        if received is not None:
            self.whole = [torch.empty_like(each) for each in self.parts]
        return received

    def give_back(self) -> None:
        """Free the parameters."""
        self.whole = []

    def reduce(self, ordered: bool, replicas: int) -> Tensor:
        """Reduce gradients to this rank's rows; return what was sent."""
        sent = self._bytes(self.ranks * self.trained)
        for whole in self.parts:
            whole.grad = None
        own = next(each for each in self.parts.values() if each.requires_grad)
        reduced = torch.empty(self.trained // own.itemsize, dtype=own.dtype, device=sent.device)
        if ordered:
            received = [torch.empty_like(sent)]
            if replicas > 1:
                received.append(self._bytes(replicas * len(sent)))
                self._copied(received[-1])
        else:
            self._copied(sent)
        reduced, at = reduced.to(own.device), 0
        for own in self.parts.values():
            if own.requires_grad:
                if own.grad is None:  # else it is added to what there is
                    own.grad = reduced[at : at + own.numel()].view(own.shape)
                    self.gradient = reduced
                at += own.untyped_storage().nbytes() // own.itemsize
        return sent

    def _copied(self, tensor: Tensor) -> None:
        """Gloo gathers and reduces in memory of its own."""
        if tensor.is_cpu and self.ranks > 1:
            torch.empty_like(tensor)

    def _bytes(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=next(iter(self.parts)).device)


def in_dtype(dtype: torch.dtype | None, values: Any) -> Any:
    """Return the values with floating-point tensors among them in another dtype."""
    if dtype is None:
        return values
    return tree_map_only(Tensor, lambda each: each.to(dtype) if each.is_floating_point() else each, values)


class _At(torch.autograd.Function):
    """Calls something once backward has the gradients of tensors."""

    @staticmethod
    def forward(ctx: Any, call: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors."""
        ctx.call = call
        ctx.set_materialize_grads(False)
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Call it; hand on the gradients."""
        ctx.call()
        return None, *gradients


def at_gradients(values: Any, call: Callable[[], None]) -> Any:
    """Return the values unchanged, with a call in backward once it has the gradients of all tensors among them."""
    tensors = [each for each in tree_leaves(values) if isinstance(each, Tensor) and each.requires_grad]
    if not tensors or not torch.is_grad_enabled():
        return values
    marked = iter(_At.apply(call, *tensors))
    return tree_map_only(Tensor, lambda each: next(marked) if each.requires_grad else each, values)
