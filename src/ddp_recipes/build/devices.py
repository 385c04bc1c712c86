"""What a rank runs on: devices that are there, or in a dry run those that would be."""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ddp_recipes.config.request import Layout, Request
from ddp_recipes.config.settings import TrainerSettings
from ddp_recipes.errors import RequestError
from ddp_recipes.runtime import fast_paths
from ddp_recipes.runtime.world import World


@dataclass(frozen=True)
class Devices:
    """What a rank runs on.

    Attributes:
        world: which of the ranks it is; in a dry run rank 0 of those that would be.
        own: this process's part of a replica, [num_devices]: where its tensors are made.
        type: ``cuda`` or ``cpu``. In a dry run for GPUs ``own`` are the CPU all the same.
        name: what people call them.
        backend: of the collectives.
        layout: the nodes of a dry run; ``None`` where all of this is there.
    """

    world: World
    own: list[torch.device]
    type: str
    name: str
    backend: str
    layout: Layout | None = None

    @property
    def requested(self) -> list[torch.device]:
        """The devices that a run would have: in a dry run those that ``own`` stand for."""
        if self.layout is None:
            return self.own
        return [torch.device(self.type, number) for number in range(len(self.own))]


def available_devices(request: Request, world: World) -> Devices:
    """Return the devices of a rank on this machine.

    Raises:
        RequestError: they are not there, or this torch lacks the backend.
    """
    gpus, k = torch.cuda.device_count(), request.num_devices
    kind = request.device_type(gpus)
    own, name = [torch.device("cpu")] * k, "CPU"
    if kind == "cuda":
        first = world.local_rank * k
        if first + k > gpus:
            raise RequestError(
                f"Local rank {world.local_rank} needs {k} GPU(s) from number {first} on (model.num_devices={k}), but "
                f"{gpus} are visible: {gpus // k} replica(s) fit on a node. Start that many processes on each."
            )
        torch.cuda.set_device(first)
        own = [torch.device("cuda", number) for number in range(first, first + k)]
        name = torch.cuda.get_device_name(first)
    backend = _backend(request, kind)
    available = {"nccl": dist.is_nccl_available(), "gloo": dist.is_gloo_available()}
    if world.world_size > 1 and not available[backend]:
        have = ", ".join(name for name, built in available.items() if built)
        raise RequestError(f"launcher.backend={backend} is not in this torch. It has: {have}. Choose one.")
    return Devices(world, own, kind, name, backend)


def dry_run_devices(request: Request, layout: Layout) -> Devices:
    """Return the devices of rank 0 in a dry run: none of them has to be there, and a GPU has no name."""
    kind = layout.device_type
    name = {"cuda": "GPU", "cpu": "CPU"}[kind]
    own = [torch.device("cpu")] * request.num_devices
    return Devices(layout.world, own, kind, name, _backend(request, kind), layout)


def _backend(request: Request, kind: str) -> str:
    if request.launcher.backend != "auto":
        return request.launcher.backend
    return "nccl" if kind == "cuda" else "gloo"


def set_torch_up(trainer: TrainerSettings, devices: Devices) -> None:
    """Set what holds for all of torch in this process."""
    fast_paths.enable(trainer.fast_paths)
    if trainer.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it
    if trainer.deterministic != torch.are_deterministic_algorithms_enabled():  # the call loads the compiler
        torch.use_deterministic_algorithms(trainer.deterministic)
    torch.autograd.set_detect_anomaly(trainer.detect_anomaly)
    if devices.own[0].type == "cpu":
        fast_paths.keep_freed_memory()
