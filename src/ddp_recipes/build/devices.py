"""What a rank runs on: devices that are there, or in a dry run those that would be."""

from dataclasses import dataclass
from typing import Any

import torch

from ddp_recipes import devices
from ddp_recipes._compat.torch_ import forget_compiled
from ddp_recipes.config.extras import extra_or
from ddp_recipes.config.request import Request
from ddp_recipes.config.settings import TrainerSettings
from ddp_recipes.errors import RequestError
from ddp_recipes.runtime.world import World


@dataclass(frozen=True)
class Devices:
    """What a rank runs on.

    Attributes:
        world: which of the ranks it is; in a dry run rank 0 of those that would be.
        own: this process's part of a replica, [num_devices]: where its tensors are made.
        type: torch's word for it. In a dry run for GPUs ``own`` are the CPU all the same.
        name: what people call them.
        backend: of the collectives.
        layout: the nodes of a dry run, as that has them; ``None`` where all of this is there.
    """

    world: World
    own: list[torch.device]
    type: str
    name: str
    backend: str
    layout: Any = None

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
    found, k = devices.known_to_torch(request.launcher.device), request.num_devices
    kind = request.device_type(found)
    own, name = [torch.device(devices.HOST)] * k, devices.title(devices.HOST)
    if kind != devices.HOST:
        own = devices.use(kind, _first(world, k, found), k)
        name = devices.name(own[0])
    backend = backend_of(request, kind)
    needed = world.world_size > 1 or request.launcher.backend != "auto"
    if needed and not devices.is_here(backend):
        have = ", ".join(devices.backends())
        raise RequestError(f"launcher.backend={backend} is not in this torch. It has: {have}. Choose one.")
    return Devices(world, own, kind, name, backend)


def _first(world: World, k: int, found: devices.Found) -> int:
    """Return the number of a rank's first device: ranks of a node share out what they see, or see their own alone."""
    first = world.local_rank * k
    if found.count == k < world.local_world_size * k:
        return 0  # as a scheduler gives each task its own: that they are not the same is agreed on
    if first + k > found.count:
        raise RequestError(
            f"Local rank {world.local_rank} needs {k} {devices.title(found.type)}(s) from number {first} on "
            f"(model.num_devices={k}), but {devices.seen(found)}: {found.count // k} replica(s) fit on a node. "
            f"Start that many processes on each."
        )
    return first


def backend_of(request: Request, kind: str) -> str:
    """Return the backend of the collectives.

    Raises:
        RequestError: it does not carry what the strategy exchanges.
    """
    strategy, backend = request.strategy, request.launcher.backend
    if strategy.backend is not None and backend not in ("auto", strategy.backend):
        raise RequestError(
            f"launcher.backend={backend} does not go with strategy={strategy.name}, whose ranks send each other "
            f"messages. Use launcher.backend={strategy.backend} (or auto)."
        )
    if backend == "auto":
        backend = strategy.backend or devices.default_backend(kind)
    if request.num_devices > 1:
        backend = devices.for_several(backend)
    if strategy.backend is None and strategy.max_world_size != 1:
        devices.refuse_backend(backend, kind, strategy.sends)
    return backend


def set_torch_up(trainer: TrainerSettings, own: Devices) -> None:
    """Set what holds for all of torch in this process."""
    forget_compiled()
    if trainer.deterministic:
        devices.set_environment_up()
    torch.autograd.set_detect_anomaly(trainer.detect_anomaly)
    # Kernels of nn.TransformerEncoder for evaluations give other numbers than those of training, and are left out where
    # a strategy has hooks; with autocast on the CPU they fail where ranks watch for collectives.
    torch.backends.mha.set_fastpath_enabled(False)
    devices.count_peak_memory(own.own)
    devices.choose(
        precision=trainer.matmul_precision, benchmark=trainer.benchmark, deterministic=trainer.deterministic or None
    )
    extra_or("trainer.fast_paths", lambda on, host: None)(trainer.fast_paths, not devices.is_accelerator(own.own[0]))
