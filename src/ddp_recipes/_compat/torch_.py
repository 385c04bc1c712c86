"""What torch keeps private: of autograd, groups, data workers, modules, optimizers and tensors.

What sees each operation, and tensors without data, is in :mod:`ddp_recipes._compat.dispatch`.
"""

import json
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._C import _distributed_c10d
from torch.distributed import ProcessGroup, distributed_c10d
from torch.optim import SGD, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import (
    tree_flatten as tree_flatten,
    tree_leaves as tree_leaves,
    tree_map_only as tree_map_only,
    tree_unflatten as tree_unflatten,
)
from torch.utils.data import DataLoader
from torch.utils.data._utils import worker

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class OnCollective(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls ``found`` with the name and the tensors of each collective of ``torch.distributed`` before it runs."""

    def __init__(self, found: Callable[[str, Sequence[Tensor]], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = found

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether what runs within is compiled all the same, which torch leaves out otherwise."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.found(func.name(), [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)])
        return func(*args, **(kwargs or {}))


def count_groups_anew() -> None:
    """Have the next process group be named as the first, which it is to a process that was started meanwhile."""
    distributed_c10d._world.group_count = 0


def every_group() -> list[ProcessGroup]:
    """Return all process groups of this process."""
    return list(distributed_c10d._world.pg_names)


def record_collectives() -> list[object]:
    """Have the flight recorder note the collectives of all groups, as long as what this returns is kept.

    gloo and the earlier NCCL do by themselves; the one that torch has by default from 2.15 on does not.
    """
    hook = getattr(_distributed_c10d, "FlightRecorderHook", None)
    return [] if hook is None else [hook.attach(group) for group in every_group()]


def recorded_collectives() -> bytes:
    """Return what the flight recorder has of this process's last collectives, as JSON; nothing where there is none.

    The earlier NCCL has a recorder of its own.
    """
    names = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
    found = [getattr(_distributed_c10d, name)() for name in names if hasattr(_distributed_c10d, name)]
    return max((each for each in found if json.loads(each).get("entries")), key=len, default=b"")


def shut_down(loader: "DataLoader[Any] | None") -> None:
    """End the persistent data workers of a loader now, if it has any.

    Their iterator's ``_shutdown_workers``. Without them they end with the loader, which is the public
    way, and takes up to five seconds each at the interpreter's end.
    """
    end = getattr(persistent(loader), "_shutdown_workers", None)
    if end is not None:
        end()


def workers_of(iterator: Any) -> tuple[list[BaseProcess], int]:
    """Return the data workers of a loader's iterator, and the number of that from which the next batch is to come.

    Its ``_workers``, ``_task_info`` and ``_rcvd_idx``.
    """
    return list(getattr(iterator, "_workers", ())), iterator._task_info.get(iterator._rcvd_idx, (0,))[0]


def persistent(loader: "DataLoader[Any] | None") -> Any:
    """Return the iterator that a loader with persistent workers keeps, ``DataLoader._iterator``, or ``None``."""
    return getattr(loader, "_iterator", None)


class _Noticing:
    """Stands for torch's ``WorkerInfo`` in a data worker, and notices who asks for its number."""

    def __init__(self, info: Any, dataset: Any) -> None:
        self._info, self.dataset, self.asked = info, dataset, False

    @property
    def id(self) -> int:
        self.asked = True
        return int(self._info.id)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._info, name)


def notice_numbers(dataset: Any) -> Callable[[], bool]:
    """Return in a data worker whether a data set has asked which worker it is in: then it gives a part of itself.

    ``get_worker_info()`` returns what is in ``torch.utils.data._utils.worker._worker_info``; its ``dataset`` is this.
    """
    noticing = _Noticing(worker._worker_info, dataset)
    worker._worker_info = noticing  # type: ignore[assignment]
    return lambda: noticing.asked


def load_what_ddp_needs() -> None:
    """Load ``torch._dynamo``, which takes a second: once before ranks are forked. Without it each rank loads its own.

    The public name, ``torch.compiler``, does not load it.
    """
    with suppress(ModuleNotFoundError):
        import torch._dynamo  # noqa: F401


@cache
def compile_nothing_of(*modules: str) -> None:
    """Have ``torch.compile`` leave the functions of these modules, and of packages all below, to Python.

    It looks at all that runs while a compiled model does, hooks too, and warns of what it cannot trace in them.
    """
    from torch._dynamo import trace_rules

    for name in modules:
        trace_rules.add(name)


def forget_compiled() -> None:
    """Have torch compile as in a new process: what it compiled before was for other models, of other sizes."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def allow_recompiles(modules: int | None) -> None:
    """Have a function that several modules share compiled as often as torch allows for one of them: 8 times for each.

    It runs as it is written from then on, and other functions do not.

    Args:
        modules: how many share it at most; ``None``: it may be compiled as often as any (256 times).
    """
    from torch._dynamo import config

    given, most = config.recompile_limit, config.accumulated_recompile_limit
    config.recompile_limit = most if modules is None else max(given, min(8 * modules, most))


def as_written() -> AbstractContextManager[None]:
    """Make a context in which nothing is compiled, nor sizes are learned for what is compiled after it."""
    if "torch._dynamo" not in sys.modules:  # which the public name loads
        return nullcontext()
    stance: AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance


def graphs_compiled() -> int:
    """Return how many graphs this process has had compiled."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def ignored_by_ddp(module: nn.Module) -> Collection[str]:
    """Return the names of the parameters and buffers that its user has told DDP to leave to each rank."""
    names: Collection[str] = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    return names


# ``nn.modules.batchnorm._BatchNorm``, or the public classes that are made of it.
BatchNorm: Any = getattr(
    nn.modules.batchnorm, "_BatchNorm", (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
)

# ``nn.modules.batchnorm._NormBase``: what keeps running statistics, those and instance norms.
NormBase: Any = getattr(
    nn.modules.batchnorm, "_NormBase", (BatchNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
)

# ``nn.modules.dropout._DropoutNd``, or the public classes that are made of it.
Dropout: Any = getattr(
    nn.modules.dropout,
    "_DropoutNd",
    (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout),
)


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Return where a module keeps its own buffers, to read and to write: ``Module._buffers``.

    ``named_buffers(recurse=False)`` is no way around it: it leaves out what is ``None``, and cannot be written to.
    """
    return module._buffers


def apply_to_own(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Change a module's own parameters and buffers, and not those of the modules in it: ``Module._apply``.

    Modules override it that keep more than these (``nn.LSTM``). There is no public way: ``Module.to``, which is made of
    it, goes into the modules inside.
    """
    module._apply(change, recurse=False)  # type: ignore[no-untyped-call]


def schedulers_in(scheduler: Any, saved: Mapping[str, Any]) -> list[tuple[Any, Mapping[str, Any]]]:
    """Return the schedulers that one is made of, as ``SequentialLR``, each with what a state of that has of it."""
    return [*zip(getattr(scheduler, "_schedulers", ()), saved.get("_schedulers", ()), strict=False)]


def note_step(optimizer: Optimizer) -> None:
    """Have schedulers know that a step was due, though a loss scaler may have skipped it: ``Optimizer._opt_called``.

    Else torch warns of a step that was forgotten where the first one overflows.
    """
    optimizer._opt_called = True  # type: ignore[attr-defined]


def ready_for_late_gradients(optimizer: Optimizer) -> None:
    """Let a fused optimizer take gradients that came later than others, or that are sparse.

    torch's fused SGD takes momentum of all parameters or of none; without any it would begin with the gradient, which
    is what comes of zeros, too. No fused one takes sparse gradients; momentum of theirs is dense then, which can be
    saved. Any other optimizer is left as it is.
    """
    state, groups = optimizer.state, optimizer.param_groups
    if len(state) == sum(len(group["params"]) for group in groups):
        return
    for group in groups:
        trained = [parameter for parameter in group["params"] if parameter.grad is not None]
        sparse = [parameter for parameter in trained if parameter.grad.is_sparse]
        if group.get("fused") and sparse:
            group["fused"] = False
        if not isinstance(optimizer, SGD) or not group["momentum"] or group["dampening"]:
            continue
        late = [parameter for parameter in trained if parameter not in state]
        for parameter in late:
            if parameter.grad.is_sparse or (group["fused"] and len(late) < len(trained)):
                state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def file_writer(writer: "SummaryWriter") -> Any:
    """Return the writer of events with times of their own: ``_get_file_writer()``, or the public ``file_writer``."""
    get = getattr(writer, "_get_file_writer", None)
    return writer.file_writer if get is None else get()


def storage_key(tensor: Tensor) -> int:
    """Return a number of the memory that a tensor lies in, the same for all its views: ``UntypedStorage._cdata``.

    A storage's public ``data_ptr()`` is no way around it: without data, on ``meta`` or fake, it is the same for all.
    """
    key: int = tensor.untyped_storage()._cdata
    return key


def writes(tensor: Tensor) -> int:
    """Return how often a tensor has been written to in place: ``Tensor._version``; 0 where nobody counts."""
    return 0 if tensor.is_inference() else tensor._version


def viewed(tensor: Tensor) -> Tensor | None:
    """Return the tensor that another one is a view of, which it keeps: ``Tensor._base``."""
    return tensor._base


def bytes_of(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes, uint8 [bytes], in its own memory if they lie there in order.

    One with a single number is contiguous whatever its strides are, which ``view`` still refuses.
    """
    whole = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)


def laid_out_as(value: Tensor, like: Tensor) -> Tensor:
    """Return a tensor that lies in memory as another one of its shape does: itself, or a copy.

    Fused optimizers go through a parameter, its gradient and its state as they lie there, and take no other notice.
    """
    if value.stride() == like.stride():
        return value
    return torch.empty_like(like, dtype=value.dtype, device=value.device).copy_(value)


def late_hooks(tensor: Tensor) -> int:
    """Return how many ``register_post_accumulate_grad_hook`` has given a tensor. No public way."""
    return len(tensor._post_accumulate_grad_hooks or {})


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a ``DTensor``, as it lies in memory; any other tensor is whole. Loads no DTensor."""
    return tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[attr-defined]


def copy_each(into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy tensors into others, in one kernel where there is ``torch._foreach_copy_``."""
    _in_place("copy_", into, values)


def add_each(into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Add tensors to others in place, in one kernel where there is ``torch._foreach_add_``."""
    _in_place("add_", into, values)


def _in_place(method: str, into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    if (kernel := getattr(torch, f"_foreach_{method}", None)) is not None:
        kernel(list(into), list(values))
        return
    with torch.no_grad():
        for tensor, value in zip(into, values, strict=True):
            getattr(tensor, method)(value)


def norm_of_each(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the norms of tensors on one device, in one kernel where there is ``torch._foreach_norm``."""
    if hasattr(torch, "_foreach_norm"):
        return list(torch._foreach_norm(list(tensors)))
    return [torch.linalg.vector_norm(tensor) for tensor in tensors]


def dump_snapshot(device_module: Any, path: Path) -> bool:
    """Write what is allocated, for https://pytorch.org/memory_viz; return whether the type of device can."""
    dump = getattr(getattr(device_module, "memory", None), "_dump_snapshot", None)
    if dump is not None:
        dump(str(path))
    return dump is not None


def record_history(device_module: Any, entries: int | None) -> None:
    """Note where so many of the latest allocations come from, for the snapshot; ``None``: no longer."""
    record = getattr(getattr(device_module, "memory", None), "_record_memory_history", None)
    if record is not None:
        record(enabled=None) if entries is None else record(max_entries=entries)


def states_of(metrics: Iterable[Any]) -> list[tuple[Any, str]]:
    """Return each tensor or list that metrics, and those in them, keep of what they saw: owner, name. ``_reductions``.

    Where several ranks compute one they gather what all have, which must be alike but for the length of lists.
    """
    owners = {id(owner): owner for metric in metrics for owner in metric.modules()}.values()
    return [
        (owner, name)
        for owner in owners
        for name in getattr(owner, "_reductions", ())
        if isinstance(getattr(owner, name), list | Tensor)
    ]
