"""What counts, in a real run, what a plan says beforehand."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ddp_recipes.models import Toy
from ddp_recipes.strategies import DDP, Single
from ddp_recipes.strategies.base import Wrapped
from ddp_recipes.tasks import StepOutput, Task


class Counting(DDP):
    """Notes the bytes that rank 0 gives to each all-reduce of gradients, in a file."""

    def __init__(self, *, folder: str, **options: Any) -> None:
        super().__init__(**options)
        self.file = Path(folder) / "all_reduced.json"
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


class Observed(Single):
    """Notes the bytes of the first batch, and those that autograd keeps of it, in a file."""

    def __init__(self, *, folder: str, processes: int = 1) -> None:
        self.file = Path(folder) / "observed.json"

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


class Residual(nn.Sequential):
    """Has a gradient that comes from two sides, a broadcast, and a view."""

    def __init__(self, in_features: int, hidden_features: int, out_features: int) -> None:
        super().__init__(nn.Linear(in_features, hidden_features), nn.Linear(hidden_features, out_features))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, input: Tensor) -> Tensor:
        hidden = torch.relu(self[0](input))
        hidden = hidden + self.scale * hidden.flip(0).t().contiguous().t().exp()
        output: Tensor = self[1](hidden)
        return output
