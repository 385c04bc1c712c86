"""What sees each of torch's operations, and tensors without data.

There is no public way for any of them; torch documents ``TorchDispatchMode`` and ``FakeTensorMode`` by these names.
"""

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["MOVES", "FakeTensorMode", "OpOverload", "TorchDispatchMode"]

# What moves a tensor between devices: ``Tensor.copy_`` and, as ``Tensor.to`` is dispatched, ``aten::_to_copy``.
MOVES = {torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default}
