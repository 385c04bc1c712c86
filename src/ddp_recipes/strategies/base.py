"""What the loop knows of a strategy, and the simplest one."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed import Store

from ddp_recipes._compat.modules import BatchNorm
from ddp_recipes.runtime.world import World
from ddp_recipes.tasks import StepOutput, Task


class Wrapped(Protocol):
    """A task as the strategy wrapped it: calling it runs a training step."""

    def __call__(self, batch: Any) -> StepOutput: ...


@dataclass(frozen=True)
class Exchange:
    """How a strategy exchanges gradients in an optimizer step, for a run on paper.

    Attributes:
        held: tensors that a rank keeps from step to step beside weights and optimizer.
        places: where in them a gradient lies at the end of a step; empty where it is a tensor of its own.
        at_once: whether a gradient is put there as soon as it is known, or once all are.
        all_reduced: bytes that each rank gives to an all-reduce.
        scattered: bytes that each rank gives to an all-to-all; ``gathered`` those to an all-gather.
        broadcast: bytes that rank 0 gives to a broadcast.
        every_batch: whether it does so for each batch of an optimizer step, or once for all of them.
    """

    held: Sequence[Tensor] = ()
    places: Mapping[nn.Parameter, Tensor] = field(default_factory=dict)
    at_once: bool = True
    all_reduced: int = 0
    scattered: int = 0
    gathered: int = 0
    broadcast: int = 0
    every_batch: bool = False


class Strategy(Protocol):
    """How replicas learn together. The loop sees only this, and a strategy never sees the loop."""

    name: str
    divisor: int  # gradients come out divided by it: where ranks' are averaged, the number of ranks
    takes_empty: bool  # whether a part without a sample has to be run as well, on one that does not count
    stages: int  # parts that the model is cut into, over processes; 1: each process has all of it
    starts: Sequence[str]  # the blocks at which the 2nd, 3rd, … of them begins
    shares_memory: bool  # ranks exchange gradients in memory, not by the backend; known once the task is wrapped

    def replicas(self, device_type: str) -> int:
        """Return how many replicas share a part of a batch; ``data.batch_size`` is for each of them."""

    def reader(self, world: World) -> tuple[int, int]:
        """Return which of how many readers of the data this rank is. Ranks of one pipeline are one reader.

        Raises:
            RequestError: this world size cannot be.
        """

    def parts(self, world: World) -> int:
        """Return how many parts of each global batch a reader computes, one after the other.

        Raises:
            RequestError: this world size cannot be.
        """

    def check(self, task: Task, devices: Sequence[torch.device], backend: str) -> None:
        """Refuse what cannot work, before anything is written.

        Raises:
            RequestError: with what to do instead.
        """

    def setup(
        self, world: World, store: Store | None, backend: str, timeout: timedelta, init_method: str | None
    ) -> None:
        """Join the other ranks. A collective: every rank calls it."""

    def shard(self, task: Task, devices: Sequence[torch.device]) -> None:
        """Leave this rank what it holds of the task, once its weights are loaded. Called before any step."""

    def wrap(self, task: Task, devices: Sequence[torch.device]) -> Wrapped:
        """Return the task as training steps run it, on this replica's devices."""

    def part(self, share: float) -> AbstractContextManager[Any]:
        """Return the context of one part of a step, which holds this share of the step's samples."""

    def accumulate(self, module: Wrapped, share: float, last: bool) -> AbstractContextManager[Any]:
        """Return the context of one batch, its loss to be multiplied with ``share``; ``last`` ends its part."""

    def reduce(self) -> None:
        """Make gradients those of the whole step, on every rank. Called once all parts are done; a collective."""

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the norm over all gradients of the model, given this rank's. A collective."""

    def weights(self, task: Task) -> dict[str, Tensor]:
        """Return the weights of the whole model, under their names, on rank 0. A collective."""

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the state of the whole model's optimizer on rank 0. A collective."""

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over rows, [rows, ...] to [...], and over ranks. A collective: rows are as many on each."""

    def gather(self, value: Any) -> list[Any] | None:
        """Return every rank's value in rank order on rank 0, ``None`` elsewhere. A collective."""

    def sync_buffers(self, task: Task) -> None:
        """Give every rank rank 0's buffers, so that all evaluate one model. A collective."""

    def exchange(self, task: Task, world: World) -> Exchange:
        """Return what a rank of that world would keep and send, for a task whose tensors may have no data.

        Raises:
            RequestError: nobody has put this on paper.
        """

    def teardown(self) -> None:
        """Leave the group."""


class Whole:
    """What strategies have in common whose ranks each hold the whole model."""

    stages = 1
    starts: Sequence[str] = ()

    def reader(self, world: World) -> tuple[int, int]:
        """Each rank reads for itself."""
        return world.rank, world.world_size

    def shard(self, task: Task, devices: Sequence[torch.device]) -> None:
        """Nothing is left out."""

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """They are all here."""
        return nn.utils.get_total_norm(gradients)

    def weights(self, task: Task) -> dict[str, Tensor]:
        """They are all here."""
        return task.weights()

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """It is all here."""
        return optimizer.state_dict()


class Single(Whole):
    """One process, no wrapper: the reference that every other strategy must agree with."""

    name = "single"
    divisor = 1
    takes_empty = False
    shares_memory = False

    def replicas(self, device_type: str) -> int:
        """One."""
        return 1

    def parts(self, world: World) -> int:
        """One: a batch is not cut."""
        return 1

    def check(self, task: Task, devices: Sequence[torch.device], backend: str) -> None:
        """Nothing can be wrong."""

    def setup(
        self, world: World, store: Store | None, backend: str, timeout: timedelta, init_method: str | None
    ) -> None:
        """There is nobody to join."""

    def wrap(self, task: Task, devices: Sequence[torch.device]) -> Wrapped:
        """Return the task itself."""
        return cast(Wrapped, task)

    def part(self, share: float) -> AbstractContextManager[Any]:
        """There is one."""
        return nullcontext()

    def accumulate(self, module: Wrapped, share: float, last: bool) -> AbstractContextManager[Any]:
        """Gradients add up by themselves."""
        return nullcontext()

    def reduce(self) -> None:
        """Gradients are complete."""

    def sum(self, values: Tensor) -> Tensor:
        """Add the rows."""
        return values.sum(dim=0)

    def gather(self, value: Any) -> list[Any] | None:
        """Return the value of the only rank."""
        return [value]

    def sync_buffers(self, task: Task) -> None:
        """There is one model."""

    def exchange(self, task: Task, world: World) -> Exchange:
        """There is nobody to exchange with."""
        return Exchange()

    def teardown(self) -> None:
        """Nothing was set up."""


def batch_norms(task: nn.Module) -> list[str]:
    """Return the names of the batch-norm modules."""
    return [name for name, module in task.named_modules() if isinstance(module, BatchNorm)]
