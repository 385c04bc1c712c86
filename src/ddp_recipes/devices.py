"""Devices: the one module that names types of accelerators, and that asks torch for what differs between them.

torch is loaded by the functions that need it: whoever starts ranks asks the drivers, and has no need of it.
"""

import ctypes
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ddp_recipes.errors import RequestError

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

HOST = "cpu"
GPU = "cuda"  # as torch calls those of ROCm, too
BUILT_FOR = "torch.cuda.get_arch_list()"  # says for which kinds of GPUs a torch was built
HOST_BACKEND, GPU_BACKEND = "gloo", "nccl"
_OF_ACCELERATORS = (GPU_BACKEND, "xccl", "hccl")  # and what begins so: torch has several ways to NCCL
_WITH_A_DEVICE_EACH = "nccl-legacy"  # torch's earlier way to NCCL, by a name that newer releases have
_WITHOUT_FLOAT64 = ("mps",)
_TITLES = {HOST: "CPU", GPU: "GPU", "xpu": "XPU", "mps": "MPS device", "npu": "NPU", "hpu": "HPU"}


@dataclass(frozen=True)
class Found:
    """Devices that a process may use.

    Attributes:
        type: torch's word for it; ``cpu`` where there is no accelerator.
        count: of accelerators.
    """

    type: str
    count: int


NONE = Found(HOST, 0)


def of_gpus(count: int) -> Found:
    """Return what so many GPUs are."""
    return Found(GPU, count) if count else NONE


def title(kind: str) -> str:
    """Return what people call a type of device."""
    return _TITLES.get(kind, kind)


# --- without torch


def visible(asked: str) -> Found:
    """Return the devices that this process may use; for GPUs of NVIDIA a hint, for which torch need not be loaded.

    Args:
        asked: ``launcher.device``.

    Raises:
        RequestError: torch does not know the type, or was built for another one.
    """
    if asked == HOST:
        return NONE
    if asked not in ("auto", GPU) or _asks_torch():
        return known_to_torch(asked)
    return of_gpus(_of_driver())


def missing(asked: str) -> str:
    """Return the message about a type of device of which there is none here; torch, once it is loaded, says why."""
    check = "CUDA_VISIBLE_DEVICES and the driver (nvidia-smi)" if asked == GPU else "its driver"
    why = f" ({_why_not(asked)})" if "torch" in sys.modules else ""
    return (
        f"launcher.device={asked}, but no {title(asked)} is visible on this machine{why}. Use launcher.device={HOST} "
        f"(or auto), or check {check}."
    )


def seen(found: Found) -> str:
    """Return how many devices a process sees, and how many the launcher may have counted, by NVIDIA's driver."""
    counted = _of_driver() if found.type == GPU else found.count
    return f"{found.count} are visible" + (f" to torch, and {counted} to the driver" if counted != found.count else "")


def refuse_on_host(backend: str) -> None:
    """Refuse a backend that takes tensors of accelerators alone, where a run is on the CPU.

    Raises:
        RequestError: it is one.
    """
    if backend.startswith(_OF_ACCELERATORS):
        raise RequestError(
            f"launcher.backend={backend} needs GPUs, and this run is on the CPU. Use launcher.backend={HOST_BACKEND} "
            f"(or auto) there."
        )


def _asks_torch() -> bool:
    """Whether torch is here for other devices than those of NVIDIA's driver, or is loaded anyway."""
    try:
        build = version("torch").rpartition("+")[2]
    except PackageNotFoundError:
        build = ""
    return build.startswith(("rocm", "xpu")) or sys.platform == "darwin"


def _of_driver() -> int:
    """Return the number of GPUs that NVIDIA's driver has for this process."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


# --- with torch


def known_to_torch(asked: str) -> Found:
    """Return the devices that torch has for this process.

    Raises:
        RequestError: it does not know the type, was built for another one, or cannot use what the driver has; says why.
    """
    import torch

    if asked == HOST:
        return NONE
    accelerator = torch.accelerator.current_accelerator()
    kind, count = (HOST, 0) if accelerator is None else (accelerator.type, torch.accelerator.device_count())
    if asked not in ("auto", kind):
        has = f"its accelerators are {kind}" if accelerator is not None else "it was built for no accelerator"
        raise RequestError(
            f"launcher.device={asked} is not to be had with this torch ({torch.__version__}): {has}. Allowed: auto, "
            f"{HOST}{'' if accelerator is None else f', {kind}'}."
        )
    if not count and asked == "auto" and (gpus := _of_driver()):
        raise RequestError(
            f"NVIDIA's driver has {gpus} GPU(s) for this process, and torch {torch.__version__} cannot use them: "
            f"{_why_not(GPU)}. Mend that, or choose launcher.device={HOST}."
        )
    return Found(kind, count) if count or asked == kind else NONE


def _why_not(kind: str) -> str:
    """Return torch's own reason for not using a device."""
    import torch

    try:
        torch.empty(0, device=kind)
    except (AssertionError, RuntimeError) as error:
        return str(error).strip().splitlines()[0].rstrip(".")
    return "it counts none"


def names(kind: str, count: int, first: int = 0) -> list[str]:
    """Return the names of so many devices of a node."""
    return [f"{kind}:{number}" for number in range(first, first + count)] if kind != HOST else [HOST]


def fake_devices(count: int) -> "list[torch.device]":
    """Return devices for tensors without data, which torch tells apart, also where there is none of them."""
    import torch

    accelerator = torch.accelerator.current_accelerator()
    kind = GPU if accelerator is None else accelerator.type
    return [torch.device(kind, number) for number in range(count)]


def is_accelerator(device: "torch.device") -> bool:
    """Whether a device has a memory of its own."""
    return device.type not in (HOST, "meta")


def fuses_alike(device: "torch.device") -> bool:
    """Whether torch's fused optimizers compute each number alike, wherever in a tensor it is."""
    return device.type == GPU


def sum_dtype(device: "torch.device") -> "torch.dtype":
    """Return what sums over samples are kept in: float64, or float32 on a type of device that has none."""
    import torch

    return torch.float32 if device.type in _WITHOUT_FLOAT64 else torch.float64


def for_sums(values: "torch.Tensor") -> "torch.Tensor":
    """Return values in :func:`sum_dtype`."""
    return values.to(sum_dtype(values.device))


def use(kind: str, first: int, count: int) -> "list[torch.device]":
    """Return devices of this process, the first of which is torch's current one from now on."""
    import torch

    torch.accelerator.set_device_index(first)
    return [torch.device(kind, number) for number in range(first, first + count)]


def all_of(kind: str) -> "list[torch.device]":
    """Return all devices of a type that this process has."""
    import torch

    return [torch.device(kind, number) for number in range(torch.accelerator.device_count())]


def module(device: "torch.device | str") -> Any:
    """Return torch's module for a type of device, ``torch.cuda`` for GPUs."""
    import torch

    return torch.get_device_module(device)


def name(device: "torch.device") -> str:
    """Return what the maker calls a device."""
    ask = getattr(module(device), "get_device_name", None)
    return str(ask(device)) if ask is not None else title(device.type)


def identity(device: "torch.device") -> str:
    """Return what tells an accelerator from all others, as its maker numbers them; empty where nothing does.

    Parts of one GPU (MIG) may have its number in common, but are made visible one by one.
    """
    properties = getattr(module(device), "get_device_properties", None) if is_accelerator(device) else None
    number = None if properties is None else getattr(properties(device), "uuid", None)
    return "" if number is None else f"{number} (CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '')})"


def seed(device: "torch.device", value: int) -> None:
    """Seed a device's generator alone."""
    generators = getattr(module(device), "default_generators", None)
    if generators is None:  # of a type that has one device
        module(device).manual_seed(value)
    else:
        generators[device.index or 0].manual_seed(value)


@contextmanager
def random_kept(devices: "Iterable[torch.device]") -> Iterator[None]:
    """Leave torch's generators, the CPU's and these devices', in the states in which they were."""
    import torch

    own = [device for device in devices if is_accelerator(device)]
    kind = own[0].type if own else GPU
    with torch.random.fork_rng([device.index or 0 for device in own], device_type=kind):
        yield


def record(device: "torch.device", *, timed: bool = False) -> "torch.Event":
    """Return an event that a device comes by once it has done what was enqueued until now."""
    import torch

    with torch.accelerator.device_index(device.index or 0):
        event = torch.Event(device, enable_timing=timed)
        event.record()
    return event


def synchronize(device: "torch.device") -> None:
    """Wait until a device has done all that was enqueued."""
    import torch

    if is_accelerator(device):
        torch.accelerator.synchronize(device)


@cache
def locks_pages() -> bool:
    """Whether this torch has page-locked memory for its accelerator; some types have none."""
    import torch

    try:
        torch.empty(1, pin_memory=True)
    except (NotImplementedError, RuntimeError):
        return False
    return True


def page_locked(size: int) -> "torch.Tensor":
    """Return so many bytes of the host's memory, uint8 [size], to which accelerators copy without anyone waiting.

    Where there is no such memory it is any other.
    """
    import torch

    return torch.empty(size, dtype=torch.uint8, pin_memory=locks_pages())


@contextmanager
def saving_through_page_locked() -> Iterator[None]:
    """Have ``torch.save`` copy what is on an accelerator to page-locked memory, one storage at a time."""
    from torch.utils.serialization import config as found

    config: Any = found

    with config.patch("save.use_pinned_memory_for_d2h", locks_pages()):
        yield


def empty_cache() -> None:
    """Give memory that torch keeps back to the devices."""
    import torch

    torch.accelerator.empty_cache()


@contextmanager
def memory_limited(device: "torch.device", fraction: float) -> Iterator[None]:
    """Have no more than a fraction of a device's memory, or than there was before, where it can be limited."""
    limit = getattr(module(device), "set_per_process_memory_fraction", None) if is_accelerator(device) else None
    if limit is None:
        yield
        return
    ask = getattr(module(device), "get_per_process_memory_fraction", None)
    before = 1.0 if ask is None else ask(device)
    limit(min(fraction, before), device)
    try:
        yield
    finally:
        limit(before, device)


def count_peak_memory(own: "Iterable[torch.device]") -> None:
    """Begin to count what :func:`peak_memory` returns."""
    import torch

    with suppress(AttributeError, NotImplementedError, RuntimeError):
        for device in filter(is_accelerator, own):
            torch.accelerator.reset_peak_memory_stats(device)


def peak_memory(own: "Iterable[torch.device]") -> int | None:
    """Return the most bytes that tensors of this process took on one of its devices; ``None`` where nothing counts."""
    import torch

    try:
        taken = [torch.accelerator.max_memory_allocated(device) for device in own if is_accelerator(device)]
    except (AttributeError, NotImplementedError, RuntimeError):  # of a type that has no such count
        return None
    return max(taken, default=None)


def dump_memory(device: "torch.device", path: Path) -> bool:
    """Write what is allocated on a type of device, for https://pytorch.org/memory_viz; return whether that can be."""
    from ddp_recipes._compat.torch_ import dump_snapshot

    return is_accelerator(device) and dump_snapshot(module(device), path)


def record_memory_history(device: "torch.device", entries: int) -> None:
    """Note where so many of the latest allocations come from, for what :func:`dump_memory` writes."""
    from ddp_recipes._compat.torch_ import record_history

    if is_accelerator(device):
        record_history(module(device), entries)


def memory_of_one(kind: str) -> int | None:
    """Return the bytes that are free on this process's first device; of a type that does not say, those that it has.

    ``None`` where there is none, or neither is known.
    """
    import torch

    if kind == HOST or not torch.accelerator.is_available():
        return None
    with suppress(AttributeError, NotImplementedError, RuntimeError):
        return int(torch.accelerator.get_memory_info(0)[0])
    ask = getattr(module(kind), "get_device_properties", None)
    return int(ask(0).total_memory) if ask is not None else None


# --- process groups


def default_backend(kind: str) -> str:
    """Return the backend for tensors of a type of device."""
    from torch import distributed as dist

    return dist.get_default_backend_for_device(kind)


def for_several(backend: str) -> str:
    """Return the backend in which a process exchanges tensors of several devices, in place of one for a device.

    From torch 2.15 on ``nccl`` has one device a group; torch's earlier way to NCCL has a communicator for each.
    """
    return _WITH_A_DEVICE_EACH if backend == GPU_BACKEND and is_here(_WITH_A_DEVICE_EACH) else backend


def is_here(backend: str) -> bool:
    """Whether this torch has a backend, or loads it when it is first used."""
    from torch import distributed as dist

    if backend in ("undefined", "fake") or ":" in backend:
        return False
    return dist.is_backend_available(backend) and (dist.is_nccl_available() or not backend.startswith(GPU_BACKEND))


def backends() -> list[str]:
    """Return the backends that this torch has."""
    from torch import distributed as dist

    loaded_later = (each.name for each in entry_points(group="torch.distributed.backends"))
    return [*filter(is_here, dict.fromkeys((*dist.Backend.backend_list, *loaded_later)))]


def refuse_backend(backend: str, kind: str, sends: bool) -> None:
    """Refuse a backend that does not carry what ranks exchange of tensors on a type of device.

    Args:
        sends: whether a rank sends such tensors to another one alone, beside collectives.

    Raises:
        RequestError: it does not take them, or only in collectives; says which does.
    """
    from torch import distributed as dist

    takes = dist.Backend.backend_capability.get(backend, [kind])
    if kind not in takes:
        why = f"takes tensors on {', '.join(takes)}, and this run's are on {kind}"
    elif sends and backend == HOST_BACKEND and kind != HOST:
        why = f"exchanges what is on {title(kind)}s in collectives alone, and ranks of this strategy send (send, recv)"
    else:
        return
    default = default_backend(kind)
    use = f"launcher.backend={default} (or auto)" if default != backend else "strategy=single"
    raise RequestError(f"launcher.backend={backend} {why}. Use {use}, or launcher.device={HOST}.")


def of_group(group: "ProcessGroup | None") -> "torch.device":
    """Return where a group takes tensors from that it exchanges."""
    import torch
    from torch import distributed as dist

    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or HOST_BACKEND in dist.get_backend(group):
        return torch.device(HOST)
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def bound_to(backend: str, own: "Sequence[torch.device]") -> "torch.device | None":
    """Return the device that a group is for: of a replica of one, so that torch connects the ranks as they join.

    Groups of some of these ranks are then split from this one by torch, and need not connect anew.
    """
    return own[0] if backend.startswith(_OF_ACCELERATORS) and len(own) == 1 else None


def beside_host(backend: str) -> str:
    """Return a backend that takes tensors on the CPU as well."""
    import torch

    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or backend == HOST_BACKEND:
        return backend
    return f"{HOST}:{HOST_BACKEND},{accelerator.type}:{backend}"


class _Choice(NamedTuple):
    """A choice that holds for all that torch does in a process."""

    get: Callable[[], Any]
    set: Callable[[Any], None]
    default: Any


def _choices() -> dict[str, _Choice]:
    """Return the choices by name."""
    import torch

    cudnn: Any = torch.backends.cudnn
    shared = torch.multiprocessing

    def of_cudnn(name: str) -> _Choice:
        return _Choice(lambda: getattr(cudnn, name), lambda value: setattr(cudnn, name, value), False)

    return {
        "dtype": _Choice(
            lambda: str(torch.get_default_dtype()).removeprefix("torch."),
            lambda name: torch.set_default_dtype(getattr(torch, name)),
            "float32",
        ),
        "precision": _Choice(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest"),
        "deterministic": _Choice(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, False),
        "benchmark": of_cudnn("benchmark"),
        "deterministic_cudnn": of_cudnn("deterministic"),
        "sharing": _Choice(shared.get_sharing_strategy, shared.set_sharing_strategy, "file_descriptor"),
    }


_CHOSEN_BEFORE: dict[str, Any] = {}  # what this process had, where a run has set something else


def choose(**wanted: Any) -> None:
    """Choose how torch computes in this process, by the names of the choices; ``None``: as it was before any run."""
    choices = _choices()
    for name, value in wanted.items():
        choice = choices[name]
        if value is not None:
            _CHOSEN_BEFORE.setdefault(name, choice.get())
        elif name not in _CHOSEN_BEFORE:
            continue
        value = _CHOSEN_BEFORE.pop(name) if value is None else value
        if value != choice.get():  # use_deterministic_algorithms loads the compiler
            choice.set(value)


def chosen_here() -> dict[str, Any]:
    """Return what this process has chosen of torch, as plain data: for ranks, in which its program does not run."""
    if "torch" not in sys.modules:
        return {}
    choices = _choices()
    now = {name: _CHOSEN_BEFORE.get(name, choice.get()) for name, choice in choices.items()}
    return {name: value for name, value in now.items() if value != choices[name].default}


def choose_as(chosen: Mapping[str, Any]) -> None:
    """Choose in this process what :func:`chosen_here` returned in another one."""
    choices = _choices() if chosen else {}
    for name, value in chosen.items():
        _CHOSEN_BEFORE.pop(name, None)
        choices[name].set(value)


def leaves_tensor_cores_idle(device: "torch.device") -> bool:
    """Whether a device multiplies float32 in full precision, as torch has it, and could do it several times as fast."""
    import torch

    if device.type != GPU or torch.version.hip is not None or torch.get_float32_matmul_precision() != "highest":
        return False
    major, _ = module(device).get_device_capability(device)
    return bool(major >= 8)  # from Ampere on


def set_environment_up() -> None:
    """Set what libraries of devices read when they begin, for operations that give the same bits again."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it
