"""torch's DistributedDataParallel."""

import inspect
from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_recipes._compat.messages import without_gradient
from ddp_recipes._compat.torch_ import ignored_by_ddp
from ddp_recipes.errors import RequestError, nearest
from ddp_recipes.runtime.tensors import sums_of_bits
from ddp_recipes.runtime.world import World
from ddp_recipes.strategies.base import Collective, Exchange, Passes, Whole, Wrapped, batch_norms, refuse_differing
from ddp_recipes.strategies.collectives import broadcast_each
from ddp_recipes.strategies.ddp.settings import DDPSettings
from ddp_recipes.strategies.ddp.shared_memory import SharedMemory, join
from ddp_recipes.strategies.group import Group
from ddp_recipes.tasks import StepOutput, Task


class DDP(Whole, Group):
    """One process a replica; gradients are averaged by all-reduce while backward runs."""

    Settings = DDPSettings
    settings: DDPSettings
    takes_empty = True  # or the others would wait for this rank in the all-reduce

    def __init__(self, settings: DDPSettings) -> None:
        self.settings = settings
        self._shared: SharedMemory | None = None
        self._sends = False
        self._norms: list[nn.Module] = []  # whose statistics are sent where training reads them, in eval mode
        self._read: set[nn.Module] = set()  # those that it has read since statistics were sent
        self.options = settings.options
        for name in self.options:
            if name not in _OPTIONS:
                raise RequestError(
                    f"strategy.{name} is no argument of DistributedDataParallel in torch {torch.__version__}. Allowed: "
                    f"{', '.join(_OPTIONS)}.{nearest(name, _OPTIONS)}"
                )

    @property
    def divisor(self) -> int:
        """The number of ranks: reduced gradients are their mean."""
        return self.world.world_size

    def check(self, task: Task, devices: Sequence[torch.device]) -> None:
        """Refuse ``sync_batchnorm`` and buffers of 8-bit floats on a CPU, besides what any strategy refuses."""
        super().check(task, devices)
        if self.settings.sync_batchnorm and devices[0].type == "cpu":
            raise RequestError(
                "strategy.sync_batchnorm=true works on GPUs only (torch's SyncBatchNorm), and this run is on the CPU. "
                "Leave it false."
            )
        for name, buffer in task.named_buffers():
            if devices[0].type == "cpu" and buffer.is_floating_point() and buffer.itemsize == 1:
                raise RequestError(
                    f"strategy=ddp sends buffers to all ranks, and on the CPU none of {buffer.dtype}, as "
                    f"{name.removeprefix('model.')} is. Keep its bytes (view(torch.uint8)), or choose "
                    f"strategy=ddp_exact."
                )

    def wrap(self, task: Task, devices: Sequence[torch.device]) -> Wrapped:
        """Wrap the task. ``device_ids`` stays ``None``: batches are in place already, and a replica may span devices.

        One replica without a hook has nothing to exchange, and runs bare.

        Raises:
            RequestError: torch would end this process.
        """
        if self.world.world_size == 1 and self.settings.comm_hook is None:
            return cast(Wrapped, task)
        if dist.get_debug_level() == dist.DebugLevel.DETAIL and not self.silent:  # it takes torch's wrapper for gloo
            raise RequestError(
                "TORCH_DISTRIBUTED_DEBUG=DETAIL ends torch's DistributedDataParallel over gloo by SIGSEGV. Set it to "
                "INFO, or choose strategy=ddp_exact, which goes with it."
            )
        if self.settings.sync_batchnorm and batch_norms(task):
            task.model = nn.SyncBatchNorm.convert_sync_batchnorm(task.model)  # type: ignore[no-untyped-call]
        options = {name: value for name, value in self.options.items() if name not in _SEND_BUFFERS}
        options[_SEND_BUFFERS[0]] = self._sends = self._sends_buffers(task)
        options.setdefault("init_sync", False)  # all have made the same weights, as they have agreed, or loaded them
        for each in task.modules():
            if isinstance(each, _SPARSE) and each.sparse:
                # Values in memory of their own: they may be those of the gradient that goes on to layers before it,
                # and torch divides them by the number of ranks.
                each.weight.register_hook(Tensor.clone)  # type: ignore[no-untyped-call]
        self._norms = [] if self._sends else [task.get_submodule(name) for name in batch_norms(task)]
        module = DistributedDataParallel(task, device_ids=None, **options)
        _settle_buckets(module, task)
        if self.settings.comm_hook is not None:
            _shorten(module, self.settings.comm_hook)
        elif self.settings.shared_memory and devices[0].type == "cpu":
            self._shared = join(self.world, self.timeout_s)
        self.shares_memory = self._shared is not None
        if self._shared is not None:
            module.register_comm_hook(None, self._shared.hook)
        return cast(Wrapped, module)

    def _sends_buffers(self, task: Task) -> bool:
        """Whether ranks get rank 0's buffers before each forward pass, which waits for the slowest of them.

        Batch norms' are not read in training, unless in eval mode, and rank 0's, which are saved, are the same either
        way; ranks get them before an evaluation, and once such a mode begins.
        """
        for name in _SEND_BUFFERS:
            if name in self.options:
                return bool(self.options[name])
        norms = {id(buffer) for name in batch_norms(task) for buffer in task.get_submodule(name).buffers()}
        return any(id(buffer) not in norms for buffer in task.buffers())

    def training_step(self, module: Wrapped, batch: Any, weight: float, last: bool, precision: Passes) -> Tensor:
        """Keep gradients local until the last micro-batch of a step."""
        self._send_read(cast(nn.Module, module))
        # torch learns a static graph from the hooks that no_sync leaves out: there gradients are exchanged each time.
        if last or not isinstance(module, DistributedDataParallel) or module.static_graph:
            return super().training_step(module, batch, weight, last, precision)
        with module.no_sync():
            return super().training_step(module, batch, weight, last, precision)

    def explain(self, error: BaseException, task: Task) -> str | None:
        """Name the parameters that got no gradients, of which torch gives the indices alone."""
        if not (indices := without_gradient(error)):
            return super().explain(error, task)
        trained = [name for name, parameter in task.named_parameters() if parameter.requires_grad]
        unused = ", ".join(trained[index].removeprefix("model.") for index in indices)
        return (
            f"The loss does not depend on these parameters: {unused}. Take them out of the model, freeze them "
            f"(requires_grad=False), or use strategy.find_unused_parameters=true."
        )

    def reduce(self) -> None:
        """Backward has done it."""

    def exchange(self, task: Task, world: World) -> Exchange:
        """Return buckets as large as the gradients, and in a step one all-reduce of each and a broadcast of buffers."""
        if world.world_size == 1 and self.settings.comm_hook is None:
            return Exchange()
        trained = [parameter for parameter in task.parameters() if parameter.requires_grad]
        kinds = dict.fromkeys((parameter.device, parameter.dtype) for parameter in trained)
        held: list[Tensor] = []
        places: dict[nn.Parameter, Tensor] = {}
        for device, dtype in kinds:
            alike = [parameter for parameter in trained if (parameter.device, parameter.dtype) == (device, dtype)]
            bucket = torch.empty(sum(parameter.numel() for parameter in alike), dtype=dtype, device=device)
            views = torch.split(bucket, [parameter.numel() for parameter in alike])
            places |= {each: view.view(each.shape) for each, view in zip(alike, views, strict=True)}
            held.append(bucket)
        sent = 2 if self.settings.rounds_gradients else None  # bytes of a number; PowerSGD begins with all of them
        all_, sends_buffers = range(world.world_size), self._sends_buffers(task)
        every: Literal["batch", "step"] = "batch" if self.options.get("static_graph") else "step"  # see accumulate
        return Exchange(
            held=held,
            places=places if self.options.get("gradient_as_bucket_view") else {},
            sent=[
                Collective("all_reduced", sum(each.numel() * (sent or each.itemsize) for each in trained), all_, every),
                Collective("broadcast", sum(each.nbytes for each in task.buffers()) * sends_buffers, all_, every),
            ],
        )

    def sum(self, values: Tensor) -> Tensor:
        """All-reduce by sum, in shared memory where there is some."""
        if self._shared is None:
            return super().sum(values)
        values = values.sum(dim=0)
        self._shared.sum(values)
        return values

    def teardown(self) -> None:
        """Leave the others first: they may wait for this rank."""
        if self._shared is not None:
            self._shared.close()
        super().teardown()

    def sync_buffers(self, task: Task) -> None:
        """Broadcast rank 0's buffers: each rank's batch norm has followed its own batches since the last step."""
        self._read.clear()  # a validation in training mode moves them again
        if self.world.world_size > 1:
            broadcast_each(task.buffers())
            if (copies := self.gather(self.copies(task))) is not None:
                refuse_differing(copies)

    def send_buffers(self, task: Task) -> None:
        """Broadcast rank 0's buffers where ``DistributedDataParallel`` does."""
        if self._sends:
            broadcast_each(task.buffers())
        self._send_read(task)

    def _send_read(self, task: nn.Module) -> None:
        """Broadcast rank 0's buffers once a batch norm is in eval mode in training: its statistics are read there."""
        read = {each for each in self._norms if not each.training}
        if not read <= self._read:
            broadcast_each(task.buffers())
        self._read = read

    def copies(self, task: Task) -> dict[str, int]:
        """Return the sums of bits of all parameters but those that DDP was told to leave to each rank."""
        alone = ignored_by_ddp(task)
        named = {name: each for name, each in task.named_parameters() if name not in alone}
        return dict(zip(named, sums_of_bits([*named.values()]), strict=True)) if self.world.world_size > 1 else {}


def _settle_buckets(module: DistributedDataParallel, task: Task) -> None:
    """Have torch arrange its buckets now, by a backward pass in which no model runs and all gradients are zero.

    It arranges them anew after the first one, by the order in which gradients came, and with them the order in which
    gradients of three or more ranks are added. The first step after a resume would then end with other bits.
    """
    if module.static_graph or any(getattr(each, "sparse", False) for each in task.modules()):
        return  # the one learns the graph from its first pass, the other would wonder at gradients that are dense

    def forward(_: Any) -> StepOutput:
        loss = torch.zeros((), device=next(task.parameters()).device)
        for parameter in filter(lambda each: each.requires_grad, task.parameters()):
            total = parameter.sum()
            loss = loss + (0 * (total.real if total.is_complex() else total)).to(loss.device)
        return StepOutput(loss, {}, 0)

    task.forward = forward  # type: ignore[method-assign, assignment]
    module(None).loss.backward()
    del task.forward
    module.zero_grad()


def _shorten(module: DistributedDataParallel, hook: str) -> None:
    """Have gradients be sent as ``strategy.comm_hook`` says."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if hook == "powersgd":
        module.register_comm_hook(powerSGD_hook.PowerSGDState(None), powerSGD_hook.powerSGD_hook)
    else:
        module.register_comm_hook(None, getattr(default_hooks, f"{hook}_compress_hook"))


_OPTIONS = sorted(inspect.signature(DistributedDataParallel).parameters.keys() - {"module", "device_ids"})
_SPARSE = (nn.Embedding, nn.EmbeddingBag)
# Since torch 2.15, and before.
_SEND_BUFFERS = [name for name in ("forward_sync_buffers", "broadcast_buffers") if name in _OPTIONS]
