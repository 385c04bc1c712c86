"""What a training step takes of each device, found in one that is run on devices that are not there.

Tensors have shapes and devices but no data (torch's ``FakeTensorMode``): forward, backward and optimizer run as they
would, and a tracker follows what they allocate and free. Allocations count as torch's CUDA allocator rounds them.
Not in it: what libraries take beside it (cuBLAS, cuDNN and NCCL workspaces, the CUDA context), and fragmentation.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ddp_recipes._compat.dispatch import FakeTensorMode
from ddp_recipes._compat.torch_ import tree_leaves
from ddp_recipes.devices import is_accelerator
from ddp_recipes.errors import RequestError
from ddp_recipes.model_parallel.placement import connect, disconnect, stages_of
from ddp_recipes.runtime.world import World
from ddp_recipes.strategies import Strategy
from ddp_recipes.strategies.base import Exchange, in_place
from ddp_recipes.tasks import Task
from ddp_recipes.tasks.fake import fake_batch, new_mode, without_data
from ddp_recipes.tools.dry_run.backward import backward, roots_of
from ddp_recipes.tools.dry_run.memory_tracker import Bytes, MemoryTracker, Saved, as_on, bytes_of, forward, storages
from ddp_recipes.training.update import needs_closure

ROUNDED = 512  # bytes: allocations on accelerators are multiples of it


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
        """Bytes that are held whatever the batch: weights, gradients, optimizer state, exchange."""
        return self.weights + self.gradients + self.optimizer + self.exchange


@dataclass(frozen=True)
class Batches:
    """The largest batches of a rank.

    Attributes:
        train: of training.
        val: of each validation set.
        accumulate: batches of an optimizer step.
    """

    train: Any
    val: Sequence[Any]
    accumulate: int


class Step:
    """A dry run of a step of one process: a copy of its task without data, its optimizer, and the memory of both.

    Args:
        task: the copy, its tensors on ``devices``; elsewhere are those that the process does not have.
        mode: makes tensors without data.
        exchange: what the process keeps and sends.
        make_optimizer: from a task.
        precision: as ``trainer.precision``.

    Attributes:
        failure: why a step could not be run without data, where it could not: its flow depends on values, mostly. Then
            neither activations nor the peak are known.
        unused: parameters that are trained and get no gradient.
    """

    def __init__(
        self,
        task: Task,
        devices: Sequence[torch.device],
        mode: FakeTensorMode,
        exchange: Exchange,
        make_optimizer: Callable[[Task], torch.optim.Optimizer],
        precision: str,
    ) -> None:
        self.task, self.devices, self.mode, self.exchange = task, devices, mode, exchange
        self.failure: str | None = None
        self.unused: list[str] = []
        self.batch, self.activations, self.gradients, self.held, self.training, self.validation = (
            Bytes() for _ in range(6)
        )
        self.precision = precision
        self.task.train()
        self.trained = {
            name: exchange.parts.get(each, each)
            for name, each in task.named_parameters()
            if each.requires_grad and each.device in devices
        }
        self.weights = [*(exchange.parts.get(each, each) for each in task.parameters()), *task.buffers()]
        self.own = set(storages((*task.parameters(), *task.buffers())))
        self.known: set[int] = set()  # those and a batch: what is no activation
        self.tracker = MemoryTracker(ROUNDED if is_accelerator(devices[0]) else 1)
        self.tracker.add((*self.weights, *exchange.held))
        self.tracker.leave_out(exchange.parts)
        with mode, torch.enable_grad(), in_place(task, exchange.parts):
            self.optimizer = make_optimizer(task)
            if needs_closure(self.optimizer):
                raise RequestError(
                    f"plan=true takes a step by one backward pass a batch, and {type(self.optimizer).__name__} takes "
                    f"several, by a closure. Leave plan out."
                )
            as_on(self.optimizer, devices[0].type)

    def run(self, batches: Batches) -> None:
        """Run it, once."""
        with self.mode, torch.enable_grad():
            try:
                with self.tracker:
                    self._steps(batches)
            except RequestError:
                raise
            except Exception as error:  # noqa: BLE001 - what fails for another reason fails in the run as well, with its traceback
                self.failure = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
                self._step_without_running()

    def _steps(self, batches: Batches) -> None:
        """Run an optimizer step and a validation step, as they are once the optimizer has its state."""
        passes = self.exchange.passes(batches.accumulate)
        for number, each in enumerate(passes):
            batch = fake_batch(batches.train, self.devices[0])
            self.batch = bytes_of(tree_leaves(batch))
            self.known.clear()
            self.known.update(self.own, storages(tree_leaves(batch)))
            with each:
                self._forward_backward(batch, first=number == 0, last=number == len(passes) - 1)
        self._put()
        self.unused = [name.removeprefix("model.") for name, each in self.trained.items() if each.grad is None]
        gradients = [each.grad for each in self.trained.values() if each.grad is not None]
        self.gradients = bytes_of(gradients)
        self.held = bytes_of(self.exchange.held, besides=gradients)
        if is_accelerator(self.devices[0]):
            del batch  # the loader keeps what it copied there from, which on the CPU is the batch itself
        before, peak = self.tracker.allocated.copy(), self.tracker.peak.copy()
        self.optimizer.step()
        state = self.tracker.allocated - before  # which is there from the second step on
        self.optimizer.step()
        self.optimizer.zero_grad()
        del gradients
        following = fake_batch(batches.train, self.devices[0])  # before the last one goes
        self.training = peak + state | self.tracker.peak  # the larger one
        del following
        if batches.val:
            self.tracker.peak = self.tracker.allocated.copy()
            self.task.eval()
            with torch.no_grad():
                for val in batches.val:
                    measured = fake_batch(val, self.devices[0])
                    self._validate(measured)
                    fake_batch(val, self.devices[0])
            self.validation = self.tracker.peak

    def _step_without_running(self) -> None:
        """Have the optimizer make its state."""
        for parameter in self.trained.values():
            parameter.grad = torch.empty_like(parameter)
        self._put()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _forward_backward(self, batch: Any, first: bool, last: bool) -> None:
        """Run one batch of an optimizer step, and count the activations of the first one."""
        saved = Saved(self.known)
        with saved if first else nullcontext(), forward(self.devices[0].type, self.precision):
            loss = self.task(batch).loss
        if first:
            self.activations = saved.bytes
        roots = roots_of(loss)
        del loss
        with torch.no_grad():
            backward(roots, partial(self._take, last))

    def _take(self, last: bool, leaf: Tensor, gradient: Tensor) -> None:
        """Take a gradient: where a strategy has a place of its own for it, it goes there."""
        if leaf.grad is None:
            leaf.grad = gradient
        else:
            leaf.grad.add_(gradient)
        if last and self.exchange.at_once and isinstance(leaf, Parameter) and leaf in self.exchange.places:
            leaf.grad = self.exchange.places[leaf]

    def _put(self) -> None:
        """Do what the strategy does once all gradients are there."""
        for parameter, place in self.exchange.places.items():
            if parameter.grad is not None:
                parameter.grad = place

    def _validate(self, batch: Any) -> None:
        with forward(self.devices[0].type, self.precision):
            self.task.validation_step(batch)

    def memory(self) -> list[DeviceMemory]:
        """Return what each device holds."""
        weights = bytes_of(self.weights)
        state = bytes_of(tree_leaves(list(self.optimizer.state.values())))
        return [
            DeviceMemory(
                weights[device],
                self.gradients[device],
                state[device],
                self.held[device],
                self.batch[device],
                self.activations[device],
                self.training[device],
                self.validation[device],
            )
            for device in self.devices
        ]


class ReplicaStep(Step):
    """A step of a process that has all of a replica, on one device or several.

    Args:
        starts: the names at which stages begin; empty for a model that is not split.
        devices: one for each stage.

    Attributes:
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
        self.whole, self.make_optimizer = whole, make_optimizer
        mode = new_mode()
        copied = without_data(task, stages_of(task.model, starts), devices, mode)
        disconnect(copied.model)
        connect(copied.model, starts, devices)
        with mode, torch.enable_grad():
            exchange = strategy.exchange(copied, world)
        super().__init__(copied, devices, mode, exchange, make_optimizer, precision)
        self.run(batches)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint has of model and optimizer: also of what other ranks have."""
        if self.exchange.parts:
            with self.mode:
                for whole, own in self.exchange.parts.items():
                    whole.data = whole.data.to(own)
                self.optimizer = self.make_optimizer(self.task)
                self.trained = {name: each for name, each in self.task.named_parameters() if each.requires_grad}
                self._step_without_running()
        return {"model": self.task.weights(), "optimizer": self.optimizer.state_dict()}
