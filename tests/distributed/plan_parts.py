"""What counts, in a real run, what a plan says beforehand."""

import json
import os
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ddp_recipes.models import Toy
from ddp_recipes.strategies import DDP, DDPPipeline, DDPPipelineSettings, DDPSettings, Single, SingleSettings
from ddp_recipes.strategies.base import Wrapped
from ddp_recipes.tasks import StepOutput, Task


@dataclass(frozen=True, kw_only=True)
class CountingSettings(DDPSettings):
    folder: str


class Counting(DDP):
    """Notes the bytes that rank 0 gives to each all-reduce of gradients, in a file."""

    def __init__(self, settings: CountingSettings) -> None:
        super().__init__(replace(settings, shared_memory=False))
        self.file = Path(settings.folder) / "all_reduced.json"
        self.bytes = 0

    def wrap(self, task: Task, devices: Sequence[torch.device]) -> Wrapped:
        module = super().wrap(task, devices)
        assert isinstance(module, DistributedDataParallel)
        module.register_comm_hook(None, self._reduce)
        self.bytes = 0
        return module

    def _reduce(self, _: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        self.bytes += bucket.buffer().nbytes
        buffer = bucket.buffer().div_(dist.get_world_size())
        work = dist.all_reduce(buffer, async_op=True)
        assert work is not None
        return work.get_future().then(lambda future: future.value()[0])

    def teardown(self) -> None:
        if self.world.is_main:
            self.file.write_text(json.dumps(self.bytes))
        super().teardown()


class CountingPipeline(DDPPipeline):
    """Notes the bytes that each rank passes on and all-reduces in each step, and those it holds, in ``$NOTES``."""

    def __init__(self, settings: DDPPipelineSettings) -> None:
        super().__init__(settings)
        self.notes: dict[str, list[int]] = {}

    def note(self, name: str, size: int) -> None:
        self.notes.setdefault(name, []).append(size)

    def wrap(self, task: Task, devices: Sequence[torch.device]) -> Wrapped:
        step = super().wrap(task, devices)
        own = [each for each in (*task.parameters(), *task.buffers()) if not each.is_meta]
        self.note("weights", sum(each.nbytes for each in own))

        def counted(batch: Any) -> StepOutput:
            with _Given("c10d::send") as given, _Kept(own, batch) as kept:
                output = step(batch)
            self.note("passed", given.bytes)
            self.note("activations", kept.most)
            self.note("batch", sum(each.nbytes for each in batch))
            return output

        return counted

    def reduce(self) -> None:
        with _Given("c10d::allreduce_") as given:
            super().reduce()
        self.note("all_reduced", given.bytes)
        self.note("gradients", sum(each.grad.nbytes for each in self.trained if each.grad is not None))

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        state = optimizer.state_dict()["state"].values()
        self.note("optimizer", sum(each.nbytes for one in state for each in one.values() if isinstance(each, Tensor)))
        return super().optimizer_state(optimizer)

    def teardown(self) -> None:
        (Path(os.environ["NOTES"]) / f"rank_{self.world.rank}.json").write_text(json.dumps(self.notes))
        super().teardown()


class _Given(TorchDispatchMode):
    """Counts the bytes of tensors that are given to a kind of communication."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.bytes = kind, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() == self.kind:
            self.bytes += sum(tensor.nbytes for tensor in args[0])
        return func(*args, **(kwargs or {}))


class _Kept(saved_tensors_hooks):
    """Follows the bytes that autograd keeps; those of weights and of the batch are none."""

    def __init__(self, own: Sequence[Tensor], batch: Sequence[Tensor]) -> None:
        self.known = {each.untyped_storage().data_ptr() for each in (*own, *batch)}
        self.holders: Counter[tuple[int, int]] = Counter()
        self.most = 0
        super().__init__(self.pack, lambda holder: holder.tensor)

    def __enter__(self) -> "_Kept":
        super().__enter__()
        return self

    def pack(self, tensor: Tensor) -> Any:
        storage, holder = tensor.untyped_storage(), _Holder(tensor.detach())
        key = storage.data_ptr(), storage.nbytes()
        if key[0] not in self.known and not tensor.is_meta:
            self.holders[key] += 1
            weakref.finalize(holder, self.release, key)
            self.most = max(self.most, sum(size for _, size in self.holders))
        return holder

    def release(self, key: tuple[int, int]) -> None:
        self.holders[key] -= 1
        if not self.holders[key]:
            del self.holders[key]


@dataclass
class _Holder:
    tensor: Tensor


@dataclass(frozen=True, kw_only=True)
class ObservedSettings(SingleSettings):
    folder: str


class Observed(Single):
    """Notes the bytes of the first batch, and those that autograd keeps of it, in a file."""

    def __init__(self, settings: ObservedSettings) -> None:
        super().__init__(settings)
        self.file = Path(settings.folder) / "observed.json"

    def wrap(self, task: Task, devices: Sequence[torch.device]) -> Wrapped:
        def step(batch: Any) -> StepOutput:
            known = {each.untyped_storage().data_ptr() for each in (*task.parameters(), *task.buffers(), *batch)}
            kept = {}

            def keep(tensor: Tensor) -> Tensor:
                kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
                return tensor

            with saved_tensors_hooks(keep, lambda saved: saved):
                output = task(batch)
            if not self.file.exists():
                saved = sum(size for address, size in kept.items() if address not in known)
                self.file.write_text(json.dumps({"activations": saved, "batch": sum(each.nbytes for each in batch)}))
            return output

        return step


class Recomputed(nn.Sequential):
    """Keeps only the inputs of its blocks, and computes what is in them again."""

    def __init__(self, in_features: int, hidden_features: int, out_features: int) -> None:
        blocks = [nn.Sequential(nn.Linear(in_features, in_features), nn.Tanh(), nn.Softplus()) for _ in range(4)]
        super().__init__(*blocks, nn.Linear(in_features, out_features))

    def forward(self, input: Tensor) -> Tensor:
        for block in self:
            input = checkpoint(block, input, use_reentrant=False)
        return input


class Branching(Toy):
    """Its flow depends on values."""

    def forward(self, input: Tensor) -> Tensor:
        output = super().forward(input)
        return output if output.sum() > 0 else -output


class Reading(torch.optim.SGD):
    """Its steps depend on values."""

    def step(self, closure: Any = None) -> None:
        if all(each.grad is None or each.grad.norm().item() < 1e9 for each in self.param_groups[0]["params"]):
            super().step(closure)


class Residual(nn.Sequential):
    """Has gradients that come from two sides, of one shape and of two, a broadcast, and a view."""

    def __init__(self, in_features: int, hidden_features: int, out_features: int) -> None:
        super().__init__(nn.Linear(in_features, hidden_features), nn.Linear(hidden_features, out_features))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, input: Tensor) -> Tensor:
        hidden, row = torch.relu(self[0](input)), self.scale.tanh() / 9
        hidden = hidden + row
        hidden = hidden + row.expand_as(hidden) * hidden.flip(0).t().contiguous().t().exp()
        output: Tensor = self[1](hidden)
        return output


class OverTwo(DDP):
    """Says that its process drives two devices at once."""

    def replicas(self, device_type: str) -> int:
        return 2


class OverTwoSettings(DDPSettings):
    """As those of DDP."""

    name = "over_two"
