"""What a training step takes of each device, found in one that is run on devices that are not there.

Tensors have shapes and devices but no data (torch's ``FakeTensorMode``): forward, backward and optimizer run as they
would, and a tracker follows what they allocate and free. Allocations count as torch's CUDA allocator rounds them.
Not in it: what libraries take beside it (cuBLAS, cuDNN and NCCL workspaces, the CUDA context), and fragmentation.
"""

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter

from ddp_recipes._compat.dispatch import FakeTensorMode, OpOverload, TorchDispatchMode
from ddp_recipes._compat.torch_ import storage_key, tree_leaves
from ddp_recipes.build.recipe import Recipe
from ddp_recipes.build.run import make_optimizer
from ddp_recipes.devices import HOST, is_accelerator
from ddp_recipes.errors import RequestError
from ddp_recipes.model_parallel.placement import connect, disconnect, stages_of
from ddp_recipes.runtime.tensors import tensors_in
from ddp_recipes.strategies.base import Exchange, in_place
from ddp_recipes.tasks import Task
from ddp_recipes.tasks.fake import fake_batch, without_data
from ddp_recipes.tools.dry_run.backward import backward, roots_of
from ddp_recipes.training.precision import make_precision
from ddp_recipes.training.update import needs_closure

ROUNDED = 512  # bytes: allocations on accelerators are multiples of it

Bytes = Counter[torch.device]

STATE = ("weights", "gradients", "optimizer", "exchange")  # what is held whatever the batch
FIGURES = (*STATE, "batch", "activations", "training", "validation")

_MIXED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


class Step:
    """A dry run of a step of one process: a copy of its task without data, its optimizer, and the memory of both.

    Args:
        task: the copy, its tensors on ``devices``; elsewhere are those that the process does not have.
        mode: makes tensors without data.
        exchange: what the process keeps and sends.

    Attributes:
        figures: bytes on each device, by name:

            - ``weights``: parameters and buffers.
            - ``gradients``: of a step, where they lie when it is done.
            - ``optimizer``: its state.
            - ``exchange``: what a strategy keeps beside the gradients, such as buckets.
            - ``batch``: of one step.
            - ``activations``: what the forward pass of a batch keeps for the backward pass.
            - ``training``: the most that is there at a time in a step. It may be less than the sum of the above, for
              not all of it is there at once, and more, for operations need room for their results.
            - ``validation``: the same of a validation batch.
        failure: why a step could not be run without data, where it could not: its flow depends on values, mostly. Then
            neither activations nor the peak are known.
        unused: parameters that are trained and get no gradient.
    """

    def __init__(
        self, recipe: Recipe, task: Task, devices: Sequence[torch.device], mode: FakeTensorMode, exchange: Exchange
    ) -> None:
        self.recipe, self.task, self.devices, self.mode, self.exchange = recipe, task, devices, mode, exchange
        self.failure: str | None = None
        self.unused: list[str] = []
        task.enter_training()
        self.trained = {
            name: exchange.parts.get(each, each)
            for name, each in task.named_parameters()
            if each.requires_grad and each.device in devices
        }
        weights = [*(exchange.parts.get(each, each) for each in task.parameters()), *task.buffers()]
        self.figures = {name: Bytes() for name in FIGURES} | {"weights": bytes_of(weights)}
        self.own = set(storages((*task.parameters(), *task.buffers())))
        self.known: set[int] = set()  # those and a batch: what is no activation
        self.tracker = MemoryTracker(ROUNDED if is_accelerator(devices[0]) else 1)
        self.tracker.add((*weights, *exchange.held))
        self.tracker.leave_out(exchange.parts)
        with mode, torch.enable_grad(), in_place(task, exchange.parts):
            self.optimizer = make_optimizer(recipe.job.config, task, may_fuse=recipe.may_fuse)
            if needs_closure(self.optimizer):
                raise RequestError(
                    f"plan=true takes a step by one backward pass a batch, and {type(self.optimizer).__name__} takes "
                    f"several, by a closure. Leave plan out."
                )
            as_on(self.optimizer, devices[0].type)

    def run(self, train: Any, val: Sequence[Any]) -> None:
        """Run it, once.

        Args:
            train: the largest batch of training.
            val: that of each validation set.
        """
        with self.mode, torch.enable_grad():
            try:
                with self.tracker:
                    self._steps(train, val)
            except RequestError:
                raise
            except Exception as error:  # noqa: BLE001 - what fails for another reason fails in the run as well, with its traceback
                self.failure = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            self.figures["optimizer"] = bytes_of(tree_leaves(list(self.optimizer.state.values())))

    def _steps(self, train: Any, val: Sequence[Any]) -> None:
        """Run an optimizer step and a validation step, as they are once the optimizer has its state."""
        device, figures, tracker = self.devices[0], self.figures, self.tracker
        accumulate = min(self.recipe.trainer.accumulate_grad_batches, len(self.recipe.loaders["train"]))
        passes = self.exchange.passes(accumulate)
        for number, each in enumerate(passes):
            batch = fake_batch(train, device)
            figures["batch"] = bytes_of(tensors_in(batch))
            self.known.clear()
            self.known.update(self.own, storages(tensors_in(batch)))
            with each:
                self._forward_backward(batch, first=number == 0, last=number == len(passes) - 1)
        self._put()
        self.unused = [name.removeprefix("model.") for name, each in self.trained.items() if each.grad is None]
        gradients = [each.grad for each in self.trained.values() if each.grad is not None]
        figures["gradients"] = bytes_of(gradients)
        figures["exchange"] = bytes_of(self.exchange.held, besides=gradients)
        if is_accelerator(device):
            del batch  # the loader keeps what it copied there from, which on the CPU is the batch itself
        before, peak = tracker.allocated.copy(), tracker.peak.copy()
        self.optimizer.step()
        state = tracker.allocated - before  # which is there from the second step on
        self.optimizer.step()
        self.optimizer.zero_grad()
        del gradients
        following = fake_batch(train, device)  # before the last one goes
        figures["training"] = peak + state | tracker.peak  # the larger one
        del following
        if val:
            tracker.peak = tracker.allocated.copy()
            self.task.eval()
            with torch.no_grad():
                for each in val:
                    measured = fake_batch(each, device)
                    self._validate(measured)
                    fake_batch(each, device)
            figures["validation"] = tracker.peak

    def _forward_backward(self, batch: Any, first: bool, last: bool) -> None:
        """Run one batch of an optimizer step, and count the activations of the first one."""
        saved = Saved(self.known)
        with saved if first else nullcontext(), self.forward_context():
            loss = self.task(batch).loss
        if first:
            self.figures["activations"] = saved.bytes
        roots = roots_of(loss)
        del loss
        with torch.no_grad():
            backward(roots, partial(self.take, last))

    @contextmanager
    def forward_context(self, cached: bool = True) -> Iterator[None]:
        """Do what a precision does in a forward pass: ``torch.autocast`` does nothing for CUDA without a driver."""
        kind, precision = self.devices[0].type, self.recipe.trainer.precision
        if (dtype := _MIXED.get(precision)) is None:
            with make_precision(precision, kind).forward():
                yield
            return
        before = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(cached)
        torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_enabled(kind, True)
        torch.autocast_increment_nesting()
        try:
            yield
        finally:
            torch.autocast_decrement_nesting()
            torch.clear_autocast_cache()
            torch.set_autocast_enabled(kind, False)
            torch.set_autocast_cache_enabled(before)

    def take(self, last: bool, leaf: Tensor, gradient: Tensor) -> None:
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
        with self.forward_context():
            self.task.validation_step(batch)


def step_of_replica(
    recipe: Recipe, starts: Sequence[str], devices: Sequence[torch.device], mode: FakeTensorMode
) -> Step:
    """Return the step of a process that has all of a replica, on one device or several.

    Args:
        starts: the names at which stages begin; empty for a model that is not split.
        devices: one for each stage.
    """
    copied = without_data(recipe.task, stages_of(recipe.task.model, starts), devices, mode)
    disconnect(copied.model)
    connect(copied.model, starts, devices)
    with mode, torch.enable_grad():
        exchange = recipe.strategy.exchange(copied, recipe.world)
    return Step(recipe, copied, devices, mode, exchange)


class MemoryTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the memory of tensors: what there is on each device, and the most there was."""

    def __init__(self, rounded: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rounded = rounded
        self.allocated: Bytes = Counter()
        self.peak: Bytes = Counter()
        self._known: dict[int, weakref.ref[Any]] = {}

    def add(self, tensors: Iterable[Any]) -> None:
        """Take in the memory of tensors that is not known yet; note when it is freed."""
        for tensor in tensors:
            if not isinstance(tensor, Tensor):
                continue
            storage, device = tensor.untyped_storage(), tensor.device
            key = storage_key(tensor)
            if key in self._known:
                continue
            size = -(-storage.nbytes() // self.rounded) * self.rounded

            def freed(_: Any, key: int = key, device: torch.device = device, size: int = size) -> None:
                del self._known[key]
                self.allocated[device] -= size

            self._known[key] = weakref.ref(storage, freed)
            self.allocated[device] += size
            self.peak[device] = max(self.peak[device], self.allocated[device])

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Count no memory for tensors: they stand for others, which are not there all the time."""
        self._known |= {storage_key(tensor): weakref.ref(tensor.untyped_storage()) for tensor in tensors}

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        self.add(tree_leaves(output))
        return output


class Saved(saved_tensors_hooks):
    """Counts what autograd keeps for the backward pass, each memory once, but for what is known."""

    def __init__(self, known: Iterable[int]) -> None:
        super().__init__(self._pack, lambda saved: saved)
        self.known = set(known)
        self.bytes: Bytes = Counter()

    def _pack(self, tensor: Tensor) -> Tensor:
        key = storage_key(tensor)
        # What is on meta takes no memory. It may go at once, and its place in memory to another tensor.
        if key not in self.known and tensor.device.type != "meta":
            self.known.add(key)
            self.bytes[tensor.device] += tensor.untyped_storage().nbytes()
        return tensor.detach()  # or an output would keep its own graph


def bytes_of(tensors: Iterable[Any], besides: Iterable[Tensor] = ()) -> Bytes:
    """Return the bytes of the memory of tensors by device, each memory once; other values are left out."""
    counted: Bytes = Counter()
    known = set(storages(besides))
    for tensor in tensors:
        if isinstance(tensor, Tensor) and storage_key(tensor) not in known:
            known.add(storage_key(tensor))
            counted[tensor.device] += tensor.untyped_storage().nbytes()
    return counted


def storages(tensors: Iterable[Any]) -> Iterator[int]:
    """Return which memory each tensor lies in."""
    return (storage_key(tensor) for tensor in tensors if isinstance(tensor, Tensor))


def as_on(optimizer: torch.optim.Optimizer, device_type: str) -> None:
    """Choose what torch chooses on GPUs: one operation for all tensors, which takes more memory at a time.

    One kernel takes no more memory than a tensor after the other does, and cannot run without data.
    """
    for group in optimizer.param_groups:
        if group.get("fused"):
            group.update(fused=False, foreach=False)
        elif device_type != HOST and group.get("foreach", False) is None:
            group["foreach"] = True
