"""Which module is in which stage, and which stage in which process, and how tensors come to it.

A stage is what one device of a replica holds. Stages follow the order in which modules are registered, as
``named_modules()`` gives it: a name in ``starts`` begins the next one.
"""

import copy
from collections.abc import Collection, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ddp_recipes._compat.model_parallel import move_own, remove_forward_pre_hooks
from ddp_recipes._compat.torch_ import apply_to_own
from ddp_recipes.tasks import Task
from ddp_recipes.tasks.blocks import is_called
from ddp_recipes.tasks.fake import computed

Stages = dict[nn.Module, int]


class Conflict(Exception):
    """The model cannot be cut between two stages; it shows in the forward of ``module`` (empty: the model itself)."""

    def __init__(self, module: str, message: str, stages: Collection[int]) -> None:
        self.module, self.stages = module, (min(stages), max(stages))
        super().__init__(message)


def stages_of(model: nn.Module, starts: Sequence[str], here: int | None = None) -> Stages:
    """Return each module's stage; parameters of its own go there.

    Args:
        here: the stage of a process that has this one alone, and constants with it. ``None``: they go by their place.
    """
    stages, stage = {}, 0
    for name, module in model.named_modules():
        stage += name in starts
        stages[module] = here if here is not None and has_constants(module) and name not in starts else stage
    return stages


def blocks_of(model: nn.Module, starts: Sequence[str]) -> dict[str, nn.Module]:
    """Return the modules through which a forward pass can enter another stage, by name.

    These are the children of modules that span stages. A block runs in one stage, unless it spans stages itself.
    """
    entered: set[nn.Module] = set()
    for name, module in model.named_modules():
        if is_cut(name, starts) or (module in entered and not is_called(module)):
            entered.update(module.children())
    return {name: module for name, module in model.named_modules() if module in entered and is_called(module)}


def is_cut(name: str, starts: Sequence[str]) -> bool:
    """Whether a module of this name holds the start of a stage; the model itself (no name) always does."""
    return name == "" or any(start.startswith(f"{name}.") for start in starts)


def has_state(module: nn.Module) -> bool:
    """Whether there are parameters or buffers in a module. One without, a ReLU say, runs wherever its inputs are."""
    return next(chain(module.parameters(), module.buffers()), None) is not None


def has_constants(module: nn.Module) -> bool:
    """Whether all that is in a module are buffers that no checkpoint has: tables of positions, say.

    A process that has one stage alone has them as well, whichever stage they are registered in: models register them
    last and use them first.
    """
    return next(module.parameters(), None) is None and has_state(module) and not module.state_dict()


def own_weights(name: str, module: nn.Module) -> list[nn.Parameter]:
    """Return a module's own parameters, if it can be the block of a stage: not the model itself, nor a container."""
    return list(module.parameters(recurse=False)) if name and is_called(module) else []


def ties(model: nn.Module) -> Iterator[list[tuple[str, nn.Module]]]:
    """Yield the owners of each parameter that several modules have: the parameter's name and the module."""
    owners: dict[nn.Parameter, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        for parameter_name, parameter in module.named_parameters(recurse=False):
            owners.setdefault(parameter, []).append((f"{name}.{parameter_name}".lstrip("."), module))
    return (found for found in owners.values() if len(found) > 1)


def place(model: nn.Module, starts: Sequence[str], devices: Sequence[torch.device]) -> None:
    """Put each stage on its device. Names in the state dict stay what they are, parameters the same objects."""
    for module, stage in stages_of(model, starts).items():
        put(module, devices[stage])


def put(module: nn.Module, device: torch.device) -> None:
    """Put a module's own parameters and buffers on a device, and not those of the modules in it."""
    apply_to_own(module, partial(Tensor.to, device=device))


def connect(model: nn.Module, starts: Sequence[str], devices: Sequence[torch.device]) -> None:
    """From now on, whatever a block is called with comes to the block's device."""
    stages = stages_of(model, starts)
    for name, block in blocks_of(model, starts).items():
        anywhere = not has_state(block) and name not in starts
        follow = partial(_follow, devices[stages[block]], anywhere)
        block.register_forward_pre_hook(follow, with_kwargs=True)


def disconnect(model: nn.Module) -> None:
    """Take back what :func:`connect` did."""
    for module in model.modules():
        remove_forward_pre_hooks(module, lambda hook: isinstance(hook, partial) and hook.func is _follow)


def _follow(
    device: torch.device, anywhere: bool, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]] | None:
    """Move a block's inputs to its device, or let it run where they are, ``anywhere``, if they are all in one place."""
    if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):  # mostly; a hook should cost next to nothing
        return None if anywhere or args[0].device == device else ((args[0].to(device),), kwargs)
    if anywhere and len({*_devices(args), *_devices(kwargs)}) < 2:
        return None
    return move(args, device), move(kwargs, device)


def move(value: Any, device: torch.device) -> Any:
    """Return a value with the tensors in it on a device: in tuples, lists, dicts and dataclasses, nested at will.

    Lists, dicts and dataclasses stay the same objects: a block may write into one, and another read it.
    """
    if isinstance(value, (Tensor, PackedSequence)):
        return value.to(device)  # type: ignore[arg-type]  # a packed sequence's type knows dtypes only
    items = _items(value)
    moved = {key: new for key, old in items if (new := move(old, device)) is not old}
    if not moved:
        return value
    if isinstance(value, tuple):
        values = [moved.get(key, old) for key, old in items]
        return type(value)(*values) if hasattr(value, "_fields") else type(value)(values)
    if isinstance(value, (list, MutableMapping)):
        for key, new in moved.items():
            value[key] = new
        return value
    if value.__dataclass_params__.frozen:
        value = copy.copy(value)
    for key, new in moved.items():
        object.__setattr__(value, key, new)
    return value


def _items(value: Any) -> list[tuple[Any, Any]]:
    """Return what is in a container by its key, index or field; nothing if it is none."""
    if isinstance(value, (tuple, list)):
        return list(enumerate(value))
    if isinstance(value, MutableMapping):
        return list(value.items())
    if is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in fields(value)]
    return []


def _devices(value: Any) -> Iterator[torch.device]:
    if isinstance(value, Tensor):
        yield value.device
    for _, item in _items(value):
        yield from _devices(item)


META = torch.device("meta")


@dataclass(frozen=True)
class Layout:
    """Which stages are where: stage s in process s modulo ``processes``."""

    starts: Sequence[str]
    processes: int
    process: int

    @property
    def stages(self) -> int:
        """The number of stages, over all processes."""
        return len(self.starts) + 1

    @property
    def mine(self) -> range:
        """Stages of this process."""
        return range(self.process, self.stages, self.processes)

    @property
    def has_last(self) -> bool:
        """Whether this process has the last stage, hence losses and outputs."""
        return self.stages - 1 in self.mine

    def stages_of(self, task: Task, here: int | None = None) -> dict[nn.Module, int]:
        """Return the stage of each module's own parameters and buffers; those around the model are in the last.

        Args:
            here: the one that has constants, of this process; its first one if left out.
        """
        stages = stages_of(task.model, self.starts, self.process if here is None else here)
        return {module: stages.get(module, self.stages - 1) for module in task.modules()}


def keep_own(task: Task, layout: Layout, device: torch.device) -> None:
    """Put the stages of this process on its device, and leave of the others names and shapes.

    Parameters stay the same objects: an optimizer that has all of them steps those that get gradients.
    """
    for module, stage in layout.stages_of(task).items():
        place = device if stage in layout.mine else META
        vars(module).update({name: each.detach().to(place) for name, each in computed(module).items()})
        if any(
            tensor.device != place for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))
        ):
            move_own(module, place)
