"""Models made without the memory of their large tensors, whose values are computed later, one after the other.

And memory and values for a task's tensors, of which some have none yet, or only some rows here.
"""

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, UntypedStorage, nn
from torch.overrides import TorchFunctionMode
from torch.utils import swap_tensors

from ddp_recipes._compat.dispatch import INSTEAD, DisableTorchFunction, OpOverload, TorchDispatchMode
from ddp_recipes._compat.torch_ import local, viewed
from ddp_recipes.build.init_recorder import InitRecorder, Ref, Undeferrable
from ddp_recipes.runtime.phases import CALLS
from ddp_recipes.runtime.seeding import rng_states, set_rng_states
from ddp_recipes.runtime.tensors import Source, rows_here, take_attributes
from ddp_recipes.tasks import Task
from ddp_recipes.tasks.task import outside

M = TypeVar("M", bound=nn.Module)

_TENSOR: Any = Tensor
# What a constructor is shown of a tensor without memory: some of torch's own look, and leave such tensors as they are.
_SHOWN = {_TENSOR.device.__get__: torch.device("cpu"), _TENSOR.is_meta.__get__: False, _TENSOR.is_cpu.__get__: True}
# What goes to the memory by itself, or replaces it.
_REFUSED = {
    getattr(_TENSOR, name): f"Tensor.{name}"
    for name in (
        *("numpy", "tolist", "data_ptr", "storage", "untyped_storage", "_typed_storage", "share_memory_"),
        *("set_", "resize_", "resize_as_", "__array__", "__dlpack__", "__reduce_ex__"),
    )
} | {_TENSOR.data.__set__: "Tensor.data = …"}


class _Dispatched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Has a recorder do what is dispatched."""

    def __init__(self, recorder: InitRecorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder = recorder

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with DisableTorchFunction():
            return self.recorder.apply(func, args, kwargs or {})


class _Called(TorchFunctionMode):
    """Shows tensors without memory as if they had it."""

    def __init__(self, recorder: InitRecorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        devices = (each for each in (*args, *kwargs.values()) if isinstance(each, (str, torch.device)))
        wished = any(str(each) == "meta" for each in devices)
        if args and isinstance(args[0], Tensor) and self.recorder.has(args[0]):
            if func in _SHOWN:
                return _SHOWN[func]
            if func in _REFUSED and not any(isinstance(each, Tensor) and self.recorder.has(each) for each in args[1:]):
                raise self.recorder.refuse(_REFUSED[func])
            if func is Tensor.cpu:
                return args[0]
            if func is Tensor.to and wished:
                raise self.recorder.refuse("Tensor.to('meta')")
            if func is Tensor.to:  # in C++, which sees where it is
                args = [_to_here(each) for each in args]
                kwargs = {name: _to_here(each) for name, each in kwargs.items()}
                return func(*args, **kwargs)
        func = INSTEAD.get(func, func)
        before = self.recorder.uses_meta
        self.recorder.uses_meta = before or wished
        try:
            return func(*args, **kwargs)
        finally:
            self.recorder.uses_meta = before


def _to_here(value: Any) -> Any:
    """Return the device of tensors without memory where the CPU is meant."""
    return torch.device("meta") if isinstance(value, (str, torch.device)) and str(value) == "cpu" else value


@dataclass(frozen=True)
class Initial:
    """The values that a constructor gives a tensor, a ``Source``."""

    recorder: InitRecorder
    ref: Ref

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.ref.size)

    @property
    def dtype(self) -> torch.dtype:
        return self.ref.dtype

    def rows(self, start: int, stop: int) -> Tensor:
        """Return rows of it; the whole is there for a moment."""
        return self.ref.on(self.recorder.replay({self.ref.number})[self.ref.number])[start:stop].clone()

    def origin(self) -> list[Any]:
        """Return what its values depend on, as plain data."""
        return [list(self.ref.size), list(self.ref.stride), self.ref.offset, *self.recorder.origin(self.ref.number)]


def without_memory(make: Callable[[], M]) -> tuple[M, dict[str, Initial], list[str]]:
    """Return what ``make`` makes, its large parameters and buffers on ``meta``, their values by name, and warnings.

    All other tensors have their memory, and generators are left as ``make`` leaves them. Where something in it cannot
    wait, all is made as it is.
    """
    states = rng_states()
    recorder = InitRecorder()
    try:
        with CALLS.with_large_memory(), _Called(recorder), _Dispatched(recorder):
            made = make()
        recorder.recent.clear()
        if recorder.refused is not None:
            raise Undeferrable(recorder.refused)
        named = [*made.named_parameters(remove_duplicate=False), *made.named_buffers(remove_duplicate=False)]
        if any(tensor.is_meta and not recorder.has(tensor) for _, tensor in named):
            raise Undeferrable("some are on meta by its own wish")
        _give_memory(recorder, {id(each) for _, tensor in named for each in (tensor, viewed(tensor))})
        initial = {name: Initial(recorder, recorder.ref(tensor)) for name, tensor in named if recorder.has(tensor)}
        return made, initial, []
    except Exception as error:  # noqa: BLE001 - any of torch's own that comes of a tensor without memory
        reason = recorder.refused or f"{type(error).__name__}: {error}"
    set_rng_states(states)
    warning = f"Each rank makes the whole model first: its constructor needs the memory of tensors ({reason})."
    return make(), {}, [warning]


def _give_memory(recorder: InitRecorder, without: set[int]) -> None:
    """Give all tensors that are there memory and values, but for some."""
    if _referenced(recorder, without):
        gc.collect()
    storages: dict[int, UntypedStorage] = {}
    while found := _referenced(recorder, without):
        found = [each for each in found if viewed(each) is not None] or found  # what they view may be theirs alone
        storages |= recorder.replay({recorder.ref(each).number for each in found} - storages.keys())
        for each in found:
            real = recorder.ref(each).on(storages[recorder.ref(each).number]).requires_grad_(each.requires_grad)
            real = nn.Parameter(real, each.requires_grad) if type(each) is nn.Parameter else real
            take_attributes(real, each)
            swap_tensors(each, real)  # type: ignore[no-untyped-call]
        del found, each, real


def _referenced(recorder: InitRecorder, without: set[int]) -> list[Tensor]:
    kinds = (each for each in gc.get_objects() if issubclass(type(each), Tensor))
    return [each for each in kinds if id(each) not in without and recorder.has(each)]


@torch.no_grad()
def materialize(task: Task, initial: Mapping[str, Source], weights: Mapping[str, Any], device: torch.device) -> None:
    """Give all tensors of a task memory on a device, and values, one after the other.

    Args:
        initial: by the names of :meth:`Task.weights`, and of other buffers likewise. A tensor that is not in it keeps
            its values.
        weights: come before these, under any name of a tensor that has several.
    """
    tensors: dict[int, Tensor] = {}
    places: dict[int, list[tuple[nn.Module, str, str]]] = {}
    for prefix, module in task.named_modules():
        own = [*module.named_parameters(recurse=False, remove_duplicate=False)]
        for name, tensor in (*own, *module.named_buffers(recurse=False, remove_duplicate=False)):
            tensors[id(tensor)] = tensor
            places.setdefault(id(tensor), []).append((module, name, outside(f"{prefix}.{name}".removeprefix("."))))
    dealt = [each for each in tensors.values() if hasattr(each, "device_mesh")]
    home = next((each.device for each in dealt if not each.is_meta), device)  # rows may be elsewhere than what runs
    with CALLS.with_large_memory():
        for key, tensor in tensors.items():
            names = [name for *_, name in places[key]]
            values = [given[name] for given in (initial, weights) for name in names if name in given]
            where = home if hasattr(tensor, "device_mesh") else device
            filled = _filled(tensor, values[-1] if values else None, where)
            if filled is not tensor:
                for module, name, _ in places[key]:
                    setattr(module, name, filled)
    task.deferred = False
    others = {name: weights[outside(name)] for name in task.state_dict() if outside(name) in weights}
    others = {name: value for name, value in others.items() if name.endswith("_extra_state")}
    task.load_state_dict(others, strict=False)  # after which FSDP2 looks at parameters again


def _filled(tensor: Tensor, value: Tensor | Source | None, device: torch.device) -> Tensor:
    """Return a tensor, or another one in its place, with a value."""
    filled = tensor
    if tensor.is_meta or tensor.device != device:
        filled = torch.empty_like(tensor, device=device)
        if isinstance(tensor, nn.Parameter):
            filled = nn.Parameter(filled, requires_grad=tensor.requires_grad)
            take_attributes(filled, tensor)
    if value is not None:
        local(filled).copy_(rows_here(value, tensor))
    elif filled is not tensor:
        local(filled).copy_(local(tensor))
    return filled
