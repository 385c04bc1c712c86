"""What sees each of torch's operations, and tensors without data.

There is no public way for any of them; torch documents ``TorchDispatchMode`` and ``FakeTensorMode`` by these names.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunction
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_recipes._compat.torch_ import tree_leaves

__all__ = ["INSTEAD", "MOVES", "DisableTorchFunction", "FakeTensorMode", "OpOverload", "TorchDispatchMode"]

# What moves a tensor between devices: ``Tensor.copy_`` and, as ``Tensor.to`` is dispatched, ``aten::_to_copy``.
MOVES = {torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default}


# What fails without data is caught where it is tried out, and told in a line; torch logs its traceback besides.
logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)


def of_values(error: BaseException) -> bool:
    """Whether tensors without data fail because a shape, or what comes next, follows from values."""
    return isinstance(error, DataDependentOutputException | DynamicOutputShapeException)


def takes_device(function: OpOverload) -> bool:
    """Whether an operation is told where to put what it makes: ``OpOverload._schema``."""
    return any(argument.name == "device" for argument in function._schema.arguments)


def written(function: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors that an operation writes to: ``OpOverload._schema``."""
    arguments = function._schema.arguments
    given = [*zip(arguments, args, strict=False), *((each, kwargs.get(each.name)) for each in arguments[len(args) :])]
    into = [value for each, value in given if each.alias_info is not None and each.alias_info.is_write]
    return [leaf for leaf in tree_leaves(into) if isinstance(leaf, Tensor)]


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    if dim in (0, v.dim() - 1):
        return torch._weight_norm_interface(v, g, dim)[0]
    return v * (g / torch.norm_except_dim(v, 2, dim))


# What a function does that compares devices before anything is dispatched: ``torch._weight_norm``, on the CPU.
INSTEAD: dict[Any, Any] = {torch._weight_norm: _weight_norm}
