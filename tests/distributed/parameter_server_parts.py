"""What tests of ``strategy=parameter_server`` look through: numbered samples, a model that leaves a trace."""

import gc
import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import TensorDataset

from ddp_recipes import Callback, Task
from ddp_recipes.models import Toy
from ddp_recipes.runtime.tensors import digest


class Numbered(TensorDataset):
    """Samples whose first feature is their number."""

    def __init__(self, num_samples: int, in_features: int, out_features: int, seed: int, split: str) -> None:
        inputs = torch.zeros(num_samples, in_features)
        inputs[:, 0] = torch.arange(num_samples)
        super().__init__(inputs, torch.zeros(num_samples, out_features))


class Traced(Toy):
    """Notes in a file which step each batch belongs to: when work on it begins, and when its gradients are there.

    Args:
        slow: the rank that takes so many seconds more for a batch.
        ahead: by how many steps another rank is to be ahead before the slow one is done with one of its batches.
    """

    def __init__(self, folder: str, global_batch: int, slow: int, seconds: float, ahead: int = 0, **sizes: int) -> None:
        super().__init__(**sizes)
        self.path, self.global_batch, self.slow, self.seconds = Path(folder) / "trace", global_batch, slow, seconds
        self.step, self.ahead = 0, ahead
        self.net1.weight.register_post_accumulate_grad_hook(lambda _: self.note("end"))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.step = int(x[0, 0]) // self.global_batch
            self.note("begin")
            if dist.get_rank() == self.slow:
                self._wait_for_others()
                time.sleep(self.seconds)
        return super().forward(x * 0)

    def _wait_for_others(self) -> None:
        """Wait until one is as far ahead; not long: it may be that this rank was dealt what it would need."""
        until = time.monotonic() + 1
        while self.ahead and self.step > 9 and time.monotonic() < until:
            if f"begin {self.step + self.ahead} " in self.path.read_text():
                self.ahead = 0
            time.sleep(0.01)

    def note(self, what: str) -> None:
        """Append a line, as a whole, whoever else writes."""
        with self.path.open("ab", buffering=0) as file:
            file.write(f"{what} {self.step} {dist.get_rank()}\n".encode())


class Look(Callback):
    """Notes on each rank the weights that it evaluates, and how many parameters its optimizer has a state for."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.weights: list[str] = []

    def on_start(self, directory: Path | None, task: Task) -> None:
        self.task = task

    def on_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        self.weights.append(digest(self.task.weights()))

    def on_end(self) -> None:
        optimizers = [each for each in gc.get_objects() if issubclass(type(each), torch.optim.Optimizer)]
        states = {parameter for each in optimizers for parameter, state in each.state.items() if state}
        notes: dict[str, Any] = {"weights": self.weights, "states": len(states & set(self.task.parameters()))}
        (self.folder / f"rank_{dist.get_rank()}.json").write_text(json.dumps(notes))


class Mortal(Toy):
    """Kills its own process with the signal, or raises, in a batch of a rank; it sleeps in all of them."""

    def __init__(self, rank: int, batch: int, number: int, **sizes: int) -> None:
        super().__init__(**sizes)
        self.rank, self.batch, self.number, self.batches = rank, batch, number, 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            time.sleep(0.01)
            self.batches += 1
            if dist.get_rank() == self.rank and self.batches == self.batch:
                if not self.number:
                    raise ValueError("the cat sat on the worker")
                os.kill(os.getpid(), self.number)
        return super().forward(x)


class Leave(Callback):
    """Kills rank 1 after five steps."""

    def on_step(self, step: int) -> None:
        if step == 5 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)


class KilledInTransfer(Callback):
    """Kills a worker in the middle of its third message of megabytes, one that it sends or receives."""

    def __init__(self, rank: int, name: str) -> None:
        self.rank, self.name = rank, name

    def on_start(self, directory: Path | None, task: Task) -> None:
        if dist.get_rank() != self.rank:
            return
        transfer, begin, seen = getattr(dist, self.name), getattr(dist, f"i{self.name}"), []

        def call(message: Tensor, *arguments: Any, **options: Any) -> None:
            if message.nbytes > 1 << 20:
                seen.append(message)
            if len(seen) < 3:
                transfer(message, *arguments, **options)
                return
            begin(message, *arguments, **options)  # more than the system keeps for whoever reads it later
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(dist, self.name, call)
