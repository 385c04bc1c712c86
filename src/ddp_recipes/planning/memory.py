"""What a training step takes of each device, found in one that is run on devices that are not there.

Tensors have shapes and devices but no data (torch's ``FakeTensorMode``): forward, backward and optimizer run as they
would, and a ledger follows what they allocate and let go. Allocations count as torch's CUDA allocator rounds them.
Not in it: what libraries take beside it (cuBLAS, cuDNN and NCCL workspaces, the CUDA context), and fragmentation.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves, tree_map_only

from ddp_recipes.errors import RequestError
from ddp_recipes.model_parallel.placement import connect, disconnect
from ddp_recipes.model_parallel.rehearsal import without_data
from ddp_recipes.planning.backward import backward
from ddp_recipes.planning.ledger import Bytes, Ledger, Saved, bytes_of, storages
from ddp_recipes.strategies import Strategy
from ddp_recipes.tasks import Task
from ddp_recipes.world import World

ROUNDED = {"cuda": 512, "cpu": 1}  # bytes: allocations are multiples of it

DTYPES = {"32-true": None, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on one device.

    Attributes:
        weights: parameters and buffers.
        gradients: of a step, where they lie when it is done.
        optimizer: its state.
        exchange: what a strategy keeps beside the gradients, such as buckets.
        batch: of one step.
        activations: what the forward pass of a batch keeps for the backward pass.
        training: the most that is there at a time in a step. It may be less than the sum of the above, for not all of
            it is there at once, and more, for operations need room for their results.
        validation: the same of a validation batch.
    """

    weights: int
    gradients: int
    optimizer: int
    exchange: int
    batch: int
    activations: int
    training: int
    validation: int

    @property
    def peak(self) -> int:
        """The most at any time."""
        return max(self.training, self.validation)

    @property
    def state(self) -> int:
        """What is there whatever the batch."""
        return self.weights + self.gradients + self.optimizer + self.exchange


@dataclass(frozen=True)
class Batches:
    """The largest batches of a rank.

    Attributes:
        train: samples of the data set, a batch of one, and how many samples a part has; ``val`` likewise, or ``None``.
        accumulate: batches of an optimizer step.
    """

    train: tuple[Any, int]
    val: tuple[Any, int] | None
    accumulate: int


class Rehearsed:
    """A task on paper: a copy without data, its optimizer, and what a step of it takes.

    Args:
        starts: the names at which stages begin; empty for a model that is not split.
        devices: one for each stage.
        make_optimizer: from a task.
        precision: as ``trainer.precision``.

    Attributes:
        failure: why a step could not be run without data, where it could not: its flow depends on values, mostly. Then
            neither activations nor the peak are known.
        unused: parameters that are trained and get no gradient.
        whole: whether a replica spans several devices and this counts them as one.
    """

    def __init__(
        self,
        task: Task,
        starts: Sequence[str],
        devices: Sequence[torch.device],
        strategy: Strategy,
        world: World,
        make_optimizer: Callable[[Task], torch.optim.Optimizer],
        batches: Batches,
        precision: str,
        whole: bool = False,
    ) -> None:
        # As in model_parallel.rehearsal: before there are devices that are not there, so that no thread is started.
        torch.zeros((), requires_grad=True).backward()  # type: ignore[no-untyped-call]
        self.devices, self.whole = devices, whole
        self.failure: str | None = None
        self.unused: list[str] = []
        self.batch, self.gradients, self.held, self.training, self.validation = (Bytes() for _ in range(5))
        self.precision = DTYPES[precision]
        self.mode = mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.task = without_data(task, starts, devices, mode)
        disconnect(self.task.model)
        connect(self.task.model, starts, devices)
        self.task.train()
        with mode, torch.enable_grad():
            self.exchange = strategy.exchange(self.task, world)
            self.optimizer = make_optimizer(self.task)
            _as_on(self.optimizer, devices[0].type)
            self.ledger = Ledger(ROUNDED[devices[0].type])
            self.saved = Saved((*self.task.parameters(), *self.task.buffers()))
            self.ledger.add((*self.task.parameters(), *self.task.buffers(), *self.exchange.held))
            try:
                with self.ledger:
                    self._steps(batches)
            except RequestError:
                raise
            except Exception as error:  # what fails for another reason fails in the run as well, and is told there
                self.failure = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
                self._step_without_running()

    def _steps(self, batches: Batches) -> None:
        """Run an optimizer step and a validation step, as they are once the optimizer has its state."""
        micros = min(batches.accumulate, 2)  # a third one would only repeat the second
        for micro in range(micros):
            batch = _fake(*batches.train, self.devices[0])
            if micro == 0:
                self.batch = bytes_of(tree_leaves(batch))
                self.saved.known.update(storages(tree_leaves(batch)))
            with self.saved if micro == 0 else nullcontext():
                roots = [self._forward(batch)]
            with torch.no_grad():
                backward(roots, self._take(last=micro == micros - 1))
        self._put()
        trained = {name: each for name, each in self.task.named_parameters() if each.requires_grad}
        self.unused = [name.removeprefix("model.") for name, each in trained.items() if each.grad is None]
        gradients = [each.grad for each in trained.values() if each.grad is not None]
        self.gradients = bytes_of(gradients)
        self.held = bytes_of(self.exchange.held, besides=gradients)
        if self.devices[0].type == "cuda":
            del batch  # the loader keeps what it copied there from, which on the CPU is the batch itself
        before, peak = self.ledger.there.copy(), self.ledger.peak.copy()
        self.optimizer.step()
        state = self.ledger.there - before  # which is there from the second step on
        self.optimizer.step()
        self.optimizer.zero_grad()
        del gradients, trained
        batch = _fake(*batches.train, self.devices[0])  # the next one, before the last one goes
        self.training = peak + state | self.ledger.peak  # the larger one
        del batch
        if batches.val is not None:
            self.ledger.peak = self.ledger.there.copy()
            self.task.eval()
            with torch.no_grad(), _autocast(self.devices[0].type, self.precision):
                self.task.validation_step(_fake(*batches.val, self.devices[0]))
            self.validation = self.ledger.peak

    def _step_without_running(self) -> None:
        """Have the optimizer make its state."""
        for parameter in self.task.parameters():
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _forward(self, batch: Any) -> Tensor:
        with _autocast(self.devices[0].type, self.precision):
            loss: Tensor = self.task(batch).loss
        return loss

    def _take(self, last: bool) -> Callable[[Parameter, Tensor], None]:
        """Return what takes a gradient: where a strategy has a place of its own for it, it goes there."""

        def take(parameter: Parameter, gradient: Tensor) -> None:
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.add_(gradient)
            if last and self.exchange.at_once and parameter in self.exchange.places:
                parameter.grad = self.exchange.places[parameter]

        return take

    def _put(self) -> None:
        for parameter, place in self.exchange.places.items():
            if parameter.grad is not None:
                parameter.grad = place

    @property
    def largest(self) -> int:
        """The peak of the fullest device."""
        return max(each.peak for each in self.memory())

    def memory(self) -> list[DeviceMemory]:
        """Return what each device holds."""
        weights = bytes_of((*self.task.parameters(), *self.task.buffers()))
        state = bytes_of(tree_leaves(list(self.optimizer.state.values())))
        return [
            DeviceMemory(
                weights[device],
                self.gradients[device],
                state[device],
                self.held[device],
                self.batch[device],
                self.saved.bytes[device],
                self.training[device],
                self.validation[device],
            )
            for device in self.devices
        ]


def _fake(sample: Any, size: int, device: torch.device) -> Any:
    """Return a batch of so many samples like the one in a batch of one."""

    def fake(tensor: Tensor) -> Tensor:
        shape = (size, *tensor.shape[1:]) if tensor.dim() else tensor.shape
        return torch.empty(shape, dtype=tensor.dtype, device=device)

    return tree_map_only(Tensor, fake, sample)


@contextmanager
def _autocast(device_type: str, dtype: torch.dtype | None) -> Iterator[None]:
    """Do what ``torch.autocast`` does, which does nothing for CUDA where there is no driver."""
    if dtype is None:
        yield
        return
    torch.set_autocast_dtype(device_type, dtype)
    torch.set_autocast_enabled(device_type, True)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()
        torch.set_autocast_enabled(device_type, False)


def _as_on(optimizer: torch.optim.Optimizer, device_type: str) -> None:
    """Choose what torch chooses on GPUs: one operation for all tensors, which takes more memory at a time.

    One kernel takes no more memory than a tensor after the other does, and cannot run without data.
    """
    for group in optimizer.param_groups:
        if group.get("fused"):
            group.update(fused=False, foreach=False)
        elif device_type == "cuda" and group.get("foreach", False) is None:
            group["foreach"] = True
