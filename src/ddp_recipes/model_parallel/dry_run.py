"""A forward pass on devices that are not there: finds operations that mix devices, and counts what modules cost.

It runs a copy of the task whose tensors have shapes and devices but no data (torch's ``FakeTensorMode``), so it takes a
fraction of a second, no memory and no GPU. What comes of it depends on the model and the shapes of a batch and on
nothing else: every rank and every start gets the same.
"""

import copy
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ddp_recipes._compat.dispatch import MOVES, FakeTensorMode, OpOverload, TorchDispatchMode
from ddp_recipes._compat.messages import cuda_devices
from ddp_recipes._compat.pytree import tree_leaves, tree_map_only
from ddp_recipes._compat.tensors import storage_key
from ddp_recipes.errors import RequestError
from ddp_recipes.model_parallel.cut import Cut
from ddp_recipes.model_parallel.placement import Conflict, connect, stages_of
from ddp_recipes.tasks import Task

INTENSITY = 20  # operations in the time of moving a byte, about that of today's GPUs and CPUs in single precision

OUTSIDE = "(task)"  # stands for what a step does around the model


@dataclass
class Costs:
    """What each module of a model costs, by name, without the modules in it.

    Attributes:
        time: of the forward pass, in bytes moved: an operation takes as long as its arithmetic or its memory traffic,
            whichever is longer. The backward pass is about twice that, in every module alike. Or of both, in
            nanoseconds, where they were timed.
        memory: bytes of weights, gradients, one number of the optimizer's for each weight, and what the backward pass
            of a batch needs.
    """

    time: Counter[str] = field(default_factory=Counter)
    memory: Counter[str] = field(default_factory=Counter)

    def share(self, name: str, *, inside: bool = False) -> float:
        """Return the mean of a module's share of time and of memory; ``inside`` adds the modules in it."""
        shares = [
            sum(each[part] for part in (each if inside else (name,)) if f"{part}.".startswith(f"{name}.")) / total
            for each in (self.time, self.memory)
            if (total := sum(each.values()))
        ]
        return sum(shares) / len(shares) if shares else 0.0

    def total(self, name: str) -> tuple[int, int]:
        """Return the time and memory of a module and those in it."""
        inside = f"{name}."
        time, memory = (
            sum(cost for part, cost in each.items() if f"{part}.".startswith(inside))
            for each in (self.time, self.memory)
        )
        return time, memory

    @classmethod
    def of_weights(cls, model: nn.Module) -> "Costs":
        """Return what is known without a rehearsal."""
        costs = cls()
        for name, module in model.named_modules():
            owned = list(module.parameters(recurse=False))
            costs.memory[name] = sum(weight.nbytes * (3 if weight.requires_grad else 1) for weight in owned)
        return costs


@dataclass
class Rehearsal:
    """One training step's forward pass, to be run as often as needed.

    Attributes:
        task: is copied for each run, and left as it is.
        step: its method to run.
        sample: a batch of one.
        size: samples in the batch to run.
        times: what modules take, by name, the same on every rank; ``None`` for what is counted.
        failure: why it could not be run, where it could not.
    """

    task: Task
    step: str
    sample: Any
    size: int
    times: Callable[[], Mapping[str, int]] | None = None
    failure: str | None = None

    def run(self, starts: Sequence[str] = ()) -> Costs:
        """Run it with the model split at ``starts``, each stage on a device of its own.

        A step whose flow depends on values cannot be run: then ``failure`` says so, and the costs are those of weights.

        Raises:
            Conflict: an operation mixes tensors of two stages.
            RequestError: the model refused its inputs itself.
        """
        devices = [torch.device("cuda", number) for number in range(len(starts) + 1)]

        def connected(stand_in: Task) -> Callable[[Any], object]:
            connect(stand_in.model, starts, devices)
            step: Callable[[Any], object] = getattr(stand_in, self.step)
            return step

        return self._run(starts, devices, devices[0], connected)

    def run_apart(self, starts: Sequence[str] = ()) -> Costs:
        """Run it for each stage as the process that holds it alone will, and return what :meth:`run` does.

        Raises:
            Conflict: a stage needs more than what its first block is called with.
            RequestError: the model refused its inputs itself.
        """
        costs = self.run()
        here, elsewhere = torch.device("cuda", 0), torch.device("cuda", 1)
        for stage in range(len(starts) + 1):

            def cut(stand_in: Task, stage: int = stage) -> Callable[[Any], object]:
                cut = Cut(stand_in, starts, elsewhere, remember=False)
                step = getattr(stand_in, self.step)
                return lambda batch: cut.run(
                    partial(step, batch), stage, lambda _, wanted: torch.empty_like(wanted, device=here)
                )

            devices = [here if number == stage else elsewhere for number in range(len(starts) + 1)]
            if self.failure is None:
                self._run(starts, devices, here, cut, between=(max(stage, 1) - 1, max(stage, 1)))
        return costs

    def _run(
        self,
        starts: Sequence[str],
        devices: Sequence[torch.device],
        first: torch.device,
        prepare: Callable[[Task], Callable[[Any], object]],
        between: Collection[int] = (),
    ) -> Costs:
        """Run what ``prepare`` makes of a copy of the task, for a batch on the device ``first``.

        Args:
            between: the stages that a mixture of devices is put down to, if these are not the stages.
        """
        mode = new_mode()
        observer = _Observer(Costs.of_weights(self.task.model), between)

        try:
            stand_in = without_data(self.task, starts, devices, mode)
            step = prepare(stand_in)
            observer.watch(stand_in)
            with mode, torch.enable_grad(), saved_tensors_hooks(observer.save, lambda saved: saved):
                batch = fake_batch(self.sample, self.size, first)
                with observer:
                    step(batch)
        except (Conflict, RequestError):
            raise
        except Exception as error:  # what fails for another reason fails in the run as well, and is told there
            named = cuda_devices(error)
            message = (str(error).splitlines() or [""])[0]
            if len(named) > 1:  # some operations find the mixture themselves, before the observer sees it
                raise observer.conflict(message, named) from None
            self.failure = f"{type(error).__name__}: {message}"
            return Costs.of_weights(self.task.model)
        return observer.costs


class _Observer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation, in whose forward it is, on which devices, and what is kept for the backward pass."""

    def __init__(self, costs: Costs, between: Collection[int]) -> None:
        from torch.utils.flop_counter import flop_registry  # with it comes Triton, which takes its time

        super().__init__()  # type: ignore[no-untyped-call]
        self.costs = costs
        self.between = between
        self.operations_of = flop_registry
        self.active = [OUTSIDE]  # the names of the modules that are running, innermost last
        self.seen: dict[int, Tensor] = {}  # by address of their memory: weights, and what is kept

    @property
    def module(self) -> str:
        """The module whose forward is running."""
        return self.active[-1]

    def conflict(self, operation: str, devices: Collection[int]) -> Conflict:
        """Return the error for an operation that mixes tensors on several devices."""
        stages = self.between or devices
        where = "the task's step" if self.module == OUTSIDE else f"the forward of {self.module or 'the model'}"
        message = (
            f"{operation} in {where} mixes tensors of stage {min(stages)} and stage {max(stages)}, and only what a "
            f"block is called with is moved"
        )
        return Conflict(self.module, message, stages)

    def watch(self, task: Task) -> None:
        """Follow which module of the model is running."""
        for tensor in (*task.parameters(), *task.buffers()):
            self.seen[storage_key(tensor)] = tensor

        def enter(name: str, *_: Any) -> None:
            self.active.append(name)

        def leave(*_: Any) -> None:
            self.active.pop()

        for name, module in task.model.named_modules():
            module.register_forward_pre_hook(partial(enter, name), prepend=True)
            module.register_forward_hook(leave)

    def save(self, tensor: Tensor) -> Tensor:
        """Count what autograd keeps, once."""
        key = storage_key(tensor)
        if key not in self.seen and self.module != OUTSIDE:
            self.seen[key] = tensor
            self.costs.memory[self.module] += tensor.untyped_storage().nbytes()
        return tensor

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        stages = {tensor.device.index for tensor in inputs if tensor.device.type == "cuda"}
        if len(stages) > 1 and func not in MOVES:
            raise self.conflict(str(func), stages)
        output = func(*args, **kwargs)
        if not func.is_view and self.module != OUTSIDE:
            outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
            count = self.operations_of.get(func.overloadpacket)
            operations = count(*args, **kwargs, out_val=output) if count is not None else 0
            moved = sum(tensor.nbytes for tensor in (*inputs, *outputs))
            self.costs.time[self.module] += max(operations // INTENSITY, moved)
        return output


def new_mode() -> FakeTensorMode:
    """Return what makes tensors without data."""
    # Autograd starts a thread for each device with its first backward pass, and then the process cannot be forked.
    # So that comes before the devices that are not there: for them it would start one as well.
    torch.zeros((), requires_grad=True).backward()  # type: ignore[no-untyped-call]
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_batch(sample: Any, size: int, device: torch.device) -> Any:
    """Return a batch of so many samples like the one in a batch of one."""

    def fake(tensor: Tensor) -> Tensor:
        shape = (size, *tensor.shape[1:]) if tensor.dim() else tensor.shape
        return torch.empty(shape, dtype=tensor.dtype, device=device)

    return tree_map_only(Tensor, fake, sample)


def without_data(
    task: Task, starts: Sequence[str], devices: Sequence[torch.device], mode: AbstractContextManager[Any]
) -> Task:
    """Return a copy of the task whose parameters and buffers are in their places, but have no data.

    Args:
        mode: makes fake tensors of new ones; where all devices are ``meta`` none is needed.
    """
    stages = stages_of(task.model, starts)
    memo: dict[int, Any] = {}
    with mode:
        for module in task.modules():
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                # Nothing of the tensor itself: weak references to it would stay.
                device = devices[stages.get(module, -1)]
                fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
                is_parameter = isinstance(tensor, nn.Parameter)
                memo[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
    return copy.deepcopy(task, memo)
