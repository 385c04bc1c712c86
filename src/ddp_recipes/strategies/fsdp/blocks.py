"""The blocks whose parameters are gathered together, and in what; parameters and optimizers that cannot be dealt."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from dis import Instruction, get_instructions
from functools import cache
from inspect import isfunction, unwrap
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from ddp_recipes._compat.fsdp import asks_rows, of_freed_memory, of_two_dtypes, uses_rows
from ddp_recipes._compat.torch_ import NormBase, late_hooks
from ddp_recipes.errors import RequestError
from ddp_recipes.strategies.fsdp.calls import own_steps
from ddp_recipes.tasks import Task
from ddp_recipes.tasks.blocks import chosen, is_called, repeated

_REDUCED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # which backends add


def policies_of(model: nn.Module, blocks: Sequence[str], param_dtype: str | None) -> dict[str, MixedPrecisionPolicy]:
    """Return the policy of each block, inner ones first, and of the model, which is called "", last.

    The model's outputs are of 32 bits, so a loss is; a step of its own is given targets, which are not cast. Norms with
    running statistics, which have 32 bits, stay as they are, so they are blocks of their own.
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
    if asks_rows(error):
        return (
            "torch.autograd.grad was asked for the gradient of a parameter of which strategy=fsdp leaves each rank "
            "some rows: a block is computed with what is gathered as it is called. Steps on parameters within a step "
            "(MAML, torch.func.functional_call) take whole ones: choose strategy=ddp or ddp_exact."
        )
    if of_freed_memory(error):
        return (
            "Backward needed parameters of a block that strategy=fsdp had given back: a gradient was taken through it "
            "in a forward pass (torch.autograd.grad), and then it was called again. Choose strategy.level=2, a "
            "strategy.wrap in which what it goes through is in no block, or strategy=ddp_exact."
        )
    if param_dtype is not None and of_two_dtypes(error):
        return (
            f"With strategy.param_dtype={param_dtype} parameters are of that type, and here they meet a tensor of "
            f"another one, such as a buffer. Take a trainer.precision that casts them at each operation (bf16-mixed "
            f"with bfloat16, 16-mixed with float16), or cast it in the model."
        )
    return None


_NO_VALUES = ("dtype", "device", "shape", "size", "dim", "requires_grad")  # of a parameter, which every rank knows
_AT_FIRST = ("__init__", "reset", "_reset", "init", "_init")  # how methods begin that no step calls
# They update each element by itself; others look at whole tensors, of which no rank has one.
_ELEMENTWISE = (
    *(torch.optim.SGD, torch.optim.ASGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam),
    *(torch.optim.RAdam, torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.Rprop),
)


def blocks_of(model: nn.Module, wrap: str | int | Sequence[str]) -> list[str]:
    """Return the names of the modules that are gathered by themselves, inner ones first.

    Raises:
        RequestError: there are none.
    """
    if isinstance(wrap, int):
        return _by_size(model, wrap)
    if wrap != "auto":
        return chosen(model, wrap, "strategy.wrap")
    if found := repeated(model):
        return found
    raise RequestError(
        f"strategy.wrap=auto takes the elements of nn.Sequential and nn.ModuleList, and {type(model).__name__} has "
        f"none with parameters. {_remedy(model)}"
    )


def _remedy(model: nn.Module) -> str:
    held = {name: each for name, each in model.named_children() if [*each.parameters()]}
    # A dict of modules is never called itself, and one of parameters has no elements that are.
    names = [name for name, each in held.items() if is_called(each)]
    names += [f"'{name}.*'" for name, each in held.items() if not is_called(each) and [*each.children()]]
    if not names:
        return "It has no modules with parameters in it at all: choose strategy=ddp."
    return f"Name its blocks: strategy.wrap=[{','.join(names)}]."


def _by_size(model: nn.Module, least: int) -> list[str]:
    """Return the modules that have ``least`` numbers or more in parameters that are in no block inside of them.

    A parameter of several modules is in the block that has them all, one that a module reads of another in its own.
    """
    places = _places(model)
    found: list[str] = []

    def left_in(name: str, module: nn.Module) -> set[nn.Parameter]:
        left, read = {*module.parameters(recurse=False)}, _read_by(module)
        for child, each in module.named_children():
            left |= {*each.parameters()} if child in read else left_in(f"{name}{child}.", each)
        own = _places(module)
        if not name or not is_called(module) or any(own[each] < places[each] for each in left):
            return left
        if sum(each.numel() for each in left) < least:
            return left
        found.append(name.removesuffix("."))
        return set()

    left_in("", model)
    if not found:
        sizes = {name: sum(each.numel() for each in module.parameters()) for name, module in model.named_modules()}
        largest = max([name for name in sizes if name], key=sizes.__getitem__, default="")
        most = f"its {largest} has {sizes[largest]}" if largest else "it has no modules in it"
        raise RequestError(
            f"strategy.wrap={least}: no module of {type(model).__name__} has so many numbers in parameters that it "
            f"shares with no other one; {most}. Take fewer, or patterns of modules' names."
        )
    return found


def _read_by(module: nn.Module) -> set[str]:
    """Return the names of the modules in this one whose parameters its code reads, be they called or not."""
    kind: Any = type(module)
    read = _reads(kind)
    return {
        name
        for name, each in module.named_children()
        if any((name, own) in read for own, _ in each.named_parameters(recurse=False))
    }


@cache
def _reads(kind: type[nn.Module]) -> frozenset[tuple[str, str]]:
    """Return what methods of a class read of its attributes: (qkv, weight) of ``linear(x, self.qkv.weight)``."""
    methods = (
        unwrap(each)
        for owner in kind.__mro__[: kind.__mro__.index(nn.Module)]
        for name, each in vars(owner).items()
        if isfunction(each) and not name.startswith(_AT_FIRST)
    )
    return frozenset(pair for each in methods for pair in _pairs([*get_instructions(each)]))


def _pairs(steps: Sequence[Instruction]) -> Iterator[tuple[str, str]]:
    for one, two, three, four in zip(steps, steps[1:], steps[2:], steps[3:], strict=False):
        loads = one.argval if isinstance(one.argval, tuple) else (one.argval,)  # two at once, from Python 3.13 on
        is_own = one.opname.startswith("LOAD_FAST") and loads[-1] == "self"
        if is_own and two.opname == three.opname == "LOAD_ATTR" and four.argval not in _NO_VALUES:
            yield two.argval, three.argval


def _places(module: nn.Module) -> Counter[nn.Parameter]:
    """Return how often each parameter is in a module."""
    return Counter(each for _, each in module.named_parameters(remove_duplicate=False))


def single_numbers(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters without rows, which every rank has."""
    return [each for each in model.parameters() if each.dim() == 0]


def refuse_parameters(task: Task, blocks: Sequence[str]) -> None:
    """Refuse a model that is wrapped, and parameters beside it, of two blocks, on two devices.

    Raises:
        RequestError: names them.
    """
    for name, module in task.model.named_modules():
        if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel, FSDPModule)):
            raise RequestError(
                f"{name or 'The model'} is wrapped as {type(module).__name__} already, and strategy=fsdp deals the "
                f"model itself. Give the module that is in it."
            )
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise RequestError(
                f"strategy=fsdp reduces dense gradients, but those of {name} are sparse. Make it with sparse=False, or "
                f"use strategy=ddp."
            )
    beside = [name for name, _ in task.named_parameters() if not name.startswith("model.")]
    if beside:
        raise RequestError(
            f"strategy=fsdp deals the parameters of the model, and the task has others beside it: "
            f"{', '.join(beside[:4])}. Put them into the model, or choose strategy=ddp."
        )
    parameters = task.model.named_parameters()
    devices = {each.device: name for name, each in parameters if not (task.deferred and each.is_meta)}
    if len(devices) > 1:
        places = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise RequestError(
            f"strategy=fsdp deals a model that is on one device, and this one is on {len(devices)}: {places}. Place "
            f"it on the first of its devices."
        )
    for name, parameter in task.model.named_parameters():
        _refuse_one(name, parameter)
    owners: dict[nn.Parameter, tuple[str, str]] = {}
    for name, parameter in task.model.named_parameters(remove_duplicate=False):
        if parameter.dim() == 0:  # each rank has it
            continue
        block = next((each for each in blocks if name.startswith(f"{each}.")), "the rest of the model")
        other, first = owners.setdefault(parameter, (block, name))
        if other != block:
            raise RequestError(
                f"{first} and {name} are one parameter, of two blocks ({other}, {block}) that strategy=fsdp gathers "
                f"one after the other. Choose strategy.wrap so that both are in one block, or in none."
            )
    refuse_dtypes(owners)


def _refuse_one(name: str, parameter: nn.Parameter) -> None:
    """Refuse a parameter that ``fully_shard`` cannot shard, or whose hooks it would never call."""
    if not parameter.numel():
        raise RequestError(
            f"{name} has no numbers: its shape is {list(parameter.shape)}. strategy=fsdp shards rows of each "
            f"parameter. Leave it out of the model, or choose strategy=ddp."
        )
    if not parameter.is_contiguous():
        raise RequestError(
            f"{name} does not lie in memory in the order of its {list(parameter.shape)}, as one that is transposed or "
            f"expanded, and strategy=fsdp shards its rows. Make it of tensor.contiguous(), or choose strategy=ddp."
        )
    if (kind := type(parameter)) is not nn.Parameter and issubclass(kind, nn.Parameter):
        raise RequestError(
            f"{name} is a {kind.__name__}, and FSDP2 puts an nn.Parameter in its place, which code that tells one from "
            f"the other would take otherwise. Set an attribute of the parameter to tell it by, or choose strategy=ddp."
        )
    if late_hooks(parameter):
        raise RequestError(
            f"{name} has a hook of register_post_accumulate_grad_hook, which looks at the whole gradient, and with "
            f"strategy=fsdp no rank has that. Take register_hook, or choose strategy=ddp."
        )


def refuse_optimizers(optimizers: Sequence[torch.optim.Optimizer], exact_on_cpu: bool) -> None:
    """Refuse those that look at whole tensors, or whose bits depend on where one is cut.

    Raises:
        RequestError: names one.
    """
    for optimizer in optimizers:
        if unwrap(type(optimizer).step) not in {unwrap(each.step) for each in _ELEMENTWISE}:
            raise RequestError(
                f"With strategy=fsdp an optimizer updates a rank's rows of each parameter, and "
                f"{type(optimizer).__name__} may look at all of it. Known to look at each number by itself: "
                f"{', '.join(each.__name__ for each in _ELEMENTWISE)} of torch.optim."
            )
        if exact_on_cpu and (dtype := _rounds_by_place(optimizer)) is not None:
            other = "" if dtype == torch.float16 else "optimizer=adamw, "
            raise RequestError(
                f"In numbers of {dtype} the CPU computes the update of {type(optimizer).__name__} otherwise at the end "
                f"of a tensor than before it, so bits depend on how a parameter is dealt. Use {other}parameters of 32 "
                f"bits with trainer.precision=bf16-mixed, or leave out strategy.shards."
            )
        if exact_on_cpu and any(group.get("fused") for group in optimizer.param_groups):
            raise RequestError(
                "optimizer.fused=true on the CPU computes the last few numbers of a tensor otherwise than the "
                "others, so bits depend on how a parameter is dealt. Leave it out, or strategy.shards."
            )


def _rounds_by_place(optimizer: torch.optim.Optimizer) -> torch.dtype | None:
    """Return the type of numbers whose update depends on where a tensor is cut, on the CPU, if there is one.

    In bfloat16 ``Tensor.add(alpha=…)`` does, of which Adam has one for a weight decay and AdamW none; in float16 nearly
    everything.
    """
    decoupled = isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)) and all(
        isinstance(optimizer, torch.optim.AdamW) or not group["weight_decay"] for group in optimizer.param_groups
    )
    dtypes = {each.dtype for group in optimizer.param_groups for each in group["params"]}
    by_place = (torch.float16,) if decoupled else (torch.float16, torch.bfloat16)
    return next((each for each in by_place if each in dtypes), None)
