"""torch's DistributedDataParallel."""

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import Store
from torch.nn.parallel import DistributedDataParallel

from ddp_recipes.errors import RequestError, nearest, not_one_of
from ddp_recipes.strategies.base import Wrapped, batch_norms
from ddp_recipes.tasks import Task
from ddp_recipes.world import World


class DDP:
    """One process a replica; gradients are averaged by all-reduce while backward runs.

    Args:
        sync_batchnorm: batch-norm statistics over all ranks; GPU only, as torch's ``SyncBatchNorm`` is.
        comm_hook: ``fp16``, ``bf16`` or ``powersgd``: what the all-reduce sends; ``None``: gradients as they are.
        options: any other argument of ``DistributedDataParallel``.
    """

    name = "ddp"

    def __init__(self, *, sync_batchnorm: bool = False, comm_hook: str | None = None, **options: Any) -> None:
        if comm_hook is not None and comm_hook not in _COMM_HOOKS:
            raise not_one_of("strategy.comm_hook", comm_hook, ["null", *_COMM_HOOKS])
        for name in options:
            if name not in _OPTIONS:
                raise RequestError(
                    f"strategy.{name} is no argument of DistributedDataParallel. Allowed: {', '.join(_OPTIONS)}."
                    f"{nearest(name, _OPTIONS)}"
                )
        self.sync_batchnorm = sync_batchnorm
        self.comm_hook = comm_hook
        self.options = {name: value for name, value in options.items() if value is not None}
        self.world = World()

    def replicas(self, device_type: str) -> int:
        """One a process."""
        return 1

    def check(self, task: Task, devices: Sequence[torch.device], backend: str) -> None:
        """Refuse ``sync_batchnorm`` on CPU and a backend that this torch was built without."""
        if self.sync_batchnorm and devices[0].type == "cpu":
            raise RequestError(
                "strategy.sync_batchnorm=true works on GPUs only (torch's SyncBatchNorm), and this run is on the CPU. "
                "Leave it false, or use a model without batch norm."
            )
        available = {"nccl": dist.is_nccl_available(), "gloo": dist.is_gloo_available()}
        if not available[backend]:
            have = ", ".join(name for name, there in available.items() if there)
            raise RequestError(f"launcher.backend={backend} is not in this torch. It has: {have}. Choose one.")

    def setup(
        self, world: World, store: Store | None, backend: str, timeout: timedelta, init_method: str | None
    ) -> None:
        """Join the process group, over the launcher's store or an address of the user's own."""
        self.world = world
        if init_method is not None:
            dist.init_process_group(
                backend, init_method=init_method, rank=world.rank, world_size=world.world_size, timeout=timeout
            )
        else:
            dist.init_process_group(
                backend, store=store or dist.HashStore(), rank=world.rank, world_size=world.world_size, timeout=timeout
            )

    def wrap(self, task: Task, devices: Sequence[torch.device]) -> Wrapped:
        """Wrap the task. ``device_ids`` stays ``None``: batches are in place already, and a replica may span devices.

        One replica without a hook has nothing to exchange, and runs bare.
        """
        if self.world.world_size == 1 and self.comm_hook is None:
            return cast(Wrapped, task)
        if self.sync_batchnorm and batch_norms(task):
            task.model = nn.SyncBatchNorm.convert_sync_batchnorm(task.model)  # type: ignore[no-untyped-call]
        module = DistributedDataParallel(task, device_ids=None, **self.options)
        if self.comm_hook is not None:
            _COMM_HOOKS[self.comm_hook](module)
        return cast(Wrapped, module)

    def accumulate(self, module: Wrapped, last: bool) -> AbstractContextManager[Any]:
        """Keep gradients local until the last micro-batch of a step."""
        # torch learns a static graph from the hooks that no_sync leaves out: there gradients are exchanged each time.
        if last or not isinstance(module, DistributedDataParallel) or module.static_graph:
            return nullcontext()
        return module.no_sync()

    def sum(self, values: Tensor) -> Tensor:
        """All-reduce by sum."""
        if self.world.world_size > 1:
            dist.all_reduce(values)
        return values

    def gather(self, value: Any) -> list[Any] | None:
        """Gather pickled values on rank 0."""
        values: list[Any] | None = [None] * self.world.world_size if self.world.is_main else None
        dist.gather_object(value, values)
        return values

    def sync_buffers(self, task: Task) -> None:
        """Broadcast rank 0's buffers: each rank's batch norm has followed its own batches since the last step."""
        if self.world.world_size > 1:
            for buffer in task.buffers():
                dist.broadcast(buffer, src=0)

    def teardown(self) -> None:
        """Destroy the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()


def _hook(name: str) -> Callable[[DistributedDataParallel], None]:
    def register(module: DistributedDataParallel) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        module.register_comm_hook(None, getattr(default_hooks, name))

    return register


def _powersgd(module: DistributedDataParallel) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    module.register_comm_hook(powerSGD_hook.PowerSGDState(None), powerSGD_hook.powerSGD_hook)


_OPTIONS = sorted(inspect.signature(DistributedDataParallel).parameters.keys() - {"module", "device_ids"})
_COMM_HOOKS: dict[str, Callable[[DistributedDataParallel], None]] = {
    "fp16": _hook("fp16_compress_hook"),
    "bf16": _hook("bf16_compress_hook"),
    "powersgd": _powersgd,
}
