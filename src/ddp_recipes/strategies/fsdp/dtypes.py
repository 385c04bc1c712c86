"""What blocks are gathered and computed in, and parameters of a type that cannot be."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from ddp_recipes._compat.fsdp import of_freed_memory, of_two_dtypes, uses_rows
from ddp_recipes._compat.torch_ import NormBase
from ddp_recipes.errors import RequestError
from ddp_recipes.strategies.fsdp.calls import own_steps

_REDUCED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # which backends add


def policies_of(model: nn.Module, blocks: Sequence[str], param_dtype: str | None) -> dict[str, MixedPrecisionPolicy]:
    """Return the policy of each block, inner ones first, and of the model, which is called "", last.

    The model's outputs are of 32 bits, so a loss is; a step of its own is given targets, which are not cast. Norms with
    running statistics, which have 32 bits, stay as they are, so they are blocks of their own.

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
        "": replace(policy, output_dtype=torch.float32, cast_forward_inputs=not own_steps(model)),
    }


def refuse_dtypes(parameters: Mapping[nn.Parameter, tuple[str, str]]) -> None:
    """Refuse parameters whose gradients cannot be reduced, or not together with those of their block.

    Args:
        parameters: of each the block and its own name.

    Raises:
        RequestError: names them.
    """
    first: dict[str, tuple[str, torch.dtype]] = {}
    for parameter, (block, name) in parameters.items():
        kind = _short(parameter.dtype)
        if (parameter.requires_grad or parameter.is_complex()) and parameter.dtype not in _REDUCED:
            raise RequestError(
                f"{name} is of {kind}, and strategy=fsdp reduces gradients of {', '.join(map(_short, _REDUCED))}. Keep "
                f"it in one of them (of a complex one, torch.view_as_real), or choose strategy=ddp."
            )
        if not parameter.requires_grad:
            continue
        other, dtype = first.setdefault(block, (name, parameter.dtype))
        if dtype != parameter.dtype:
            raise RequestError(
                f"{other} is of {_short(dtype)} and {name} of {kind}, both in one block ({block}) of strategy=fsdp, "
                f"whose gradients are reduced together. Choose strategy.wrap so that they are in two, or give them one "
                f"dtype; strategy.param_dtype is what they are computed in."
            )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def explanation(error: BaseException, param_dtype: str | None) -> str | None:
    """Return why a step of a model that is dealt failed, and what to do, where torch's words are not enough."""
    if uses_rows(error):
        return (
            "A module used parameters of another one without calling it, and strategy=fsdp gathers those of a block "
            "when it is called. Choose strategy.wrap so that both are in one block, or call the module."
        )
    if of_freed_memory(error):
        return (
            "Backward needed parameters of a block that strategy=fsdp had given back. That comes of a gradient of "
            "gradients: torch.autograd.grad in a forward pass, through blocks. Choose strategy.wrap so that what it "
            "goes through is in no block, or strategy=ddp_exact."
        )
    if param_dtype is not None and of_two_dtypes(error):
        return (
            f"With strategy.param_dtype={param_dtype} parameters are of that type, and here they meet a tensor of "
            f"another one, such as a buffer. Take a trainer.precision that casts them at each operation (bf16-mixed "
            f"with bfloat16, 16-mixed with float16), or cast it in the model."
        )
    return None
