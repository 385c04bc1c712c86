"""What blocks are gathered and computed in."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from ddp_recipes._compat.modules import NormBase


def policies_of(model: nn.Module, blocks: Sequence[str], param_dtype: str | None) -> dict[str, MixedPrecisionPolicy]:
    """Return the policy of each block, inner ones first, and of the model, which is called "", last.

    The model's outputs are of 32 bits, so a loss is. Norms with running statistics, which have 32 bits, stay as they
    are, so they are blocks of their own.

    Args:
        param_dtype: as ``strategy.param_dtype``.
    """
    if param_dtype is None:
        return dict.fromkeys([*blocks, ""], MixedPrecisionPolicy())
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, param_dtype), reduce_dtype=torch.float32)
    norms = [name for name, each in model.named_modules() if isinstance(each, NormBase) and each.affine]
    return {
        **dict.fromkeys([*norms, *blocks], policy),
        **dict.fromkeys(norms, MixedPrecisionPolicy()),
        "": replace(policy, output_dtype=torch.float32),
    }
