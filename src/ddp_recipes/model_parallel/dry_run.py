"""A dry run of a split: finds operations that mix devices, and counts what modules cost.

It runs a copy of the task on fake tensors, so it takes a fraction of a second, no memory and no GPU. Its result depends
on the model and the shapes of a batch and on nothing else: every rank and every start gets the same. And, where that is
asked for, how long modules take on a device, each operation of a step on its own.
"""

import copy
import statistics
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ddp_recipes import devices
from ddp_recipes._compat.dispatch import MOVES, OpOverload, TorchDispatchMode, of_values
from ddp_recipes._compat.model_parallel import current_node, next_sequence_number, sequence_number, stages_named
from ddp_recipes._compat.torch_ import storage_key, tree_leaves, tree_map_only
from ddp_recipes.devices import HOST, fake_devices, is_accelerator
from ddp_recipes.errors import RequestError
from ddp_recipes.model_parallel.cut import Cut
from ddp_recipes.model_parallel.placement import META, Conflict, connect, stages_of
from ddp_recipes.runtime.seeding import seeded
from ddp_recipes.runtime.tensors import take_attributes
from ddp_recipes.tasks import Task
from ddp_recipes.tasks.fake import Uncopied, computed, copied, fake_batch, new_mode, without_data

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

    def fraction(self, names: Collection[str]) -> float:
        """Return the mean of the modules' fractions of all time and of all memory."""
        totals = [(each, total) for each in (self.time, self.memory) if (total := sum(each.values()))]
        return sum(sum(each[name] for name in names) / total for each, total in totals) / max(1, len(totals))

    def inside(self, module: str) -> list[str]:
        """Return the names of a module and those in it."""
        return [name for name in self.memory if f"{name}.".startswith(f"{module}.")]

    @classmethod
    def of_weights(cls, model: nn.Module) -> "Costs":
        """Return what is known without a dry run."""
        costs = cls()
        for name, module in model.named_modules():
            owned = list(module.parameters(recurse=False))
            costs.memory[name] = sum(weight.nbytes * (3 if weight.requires_grad else 1) for weight in owned)
        return costs


@dataclass
class DryRun:
    """One step's forward pass, to be run without data as often as needed.

    Attributes:
        task: is copied for each run, and left as it is.
        step: its method to run.
        batch_of: returns a batch of so many samples.
        size: of the batch to run.
        times: what modules take, by name, the same on every rank; ``None`` for what is counted.
        failure: why it could not be run, where it could not.
    """

    task: Task
    step: str
    batch_of: Callable[[int], Any]
    size: int
    times: Callable[[], Mapping[str, int]] | None = None
    failure: str | None = None

    def run(self, starts: Sequence[str] = ()) -> Costs:
        """Run it with the model split at ``starts``, each stage on a device of its own.

        A step whose flow depends on values cannot be run: then ``failure`` says so, and the costs are those of weights.

        Raises:
            Conflict: an operation mixes tensors of two stages.
        """
        devices = fake_devices(len(starts) + 1)

        def connected(task: Task) -> Callable[[Any], object]:
            connect(task.model, starts, devices)
            step: Callable[[Any], object] = getattr(task, self.step)
            return step

        costs = self._run(starts, devices, connected)
        if self.failure is None or starts:
            return costs
        self.failure, devices = None, [torch.device(HOST)]  # a gradient within the step takes a device that is there
        return self._run(starts, devices, connected)

    def run_apart(self, starts: Sequence[str] = ()) -> Costs:
        """Run it for each stage as the process that holds it alone will, and return what :meth:`run` does.

        What fake tensors cannot run, such as a flow that depends on values of the inputs, runs on the CPU.

        Raises:
            Conflict: a stage needs more than what its first block is called with.
        """
        costs, stages = self.costs, range(len(starts), -1, -1)  # a cut that cannot be mostly fails in the last stage
        on_cpu = self.failure is not None
        failed = [stage for stage in stages if on_cpu or not self._runs_apart(starts, stage)]
        if len(failed) < len(stages) and not self._has_shapes(starts):
            failed = [*stages]
        for stage in failed:
            self._run_on_cpu(starts, stage, _between(stage))
        return costs

    def _runs_apart(self, starts: Sequence[str], stage: int) -> bool:
        """Run a stage as the process that holds it alone will; say whether it could be run without data."""
        here, elsewhere = fake_devices(2)

        def cut(task: Task) -> Callable[[Any], object]:
            cut, step = Cut(task, starts, elsewhere), getattr(task, self.step)
            return lambda batch: cut.run(
                partial(step, batch), stage, lambda _, wanted: torch.empty_like(wanted, device=here)
            )

        devices = [here if number == stage else elsewhere for number in range(len(starts) + 1)]
        self._run(starts, devices, cut, _between(stage), stage)
        failed, self.failure = self.failure, None
        return failed is None

    def _has_shapes(self, starts: Sequence[str]) -> bool:
        """Whether the blocks before each cut run without data as in the run: some models spare fake tensors.

        Those of Transformers ask whether a mask masks anything, but not a tensor by which somebody traces them.

        Raises:
            Conflict: as :meth:`run_apart`.
        """
        try:
            shapes = without_data(self.task, {}, [META], nullcontext())
            cut, step = Cut(shapes, starts, META), self._step_on_cpu(shapes)
            with seeded(0), torch.enable_grad():
                for stage in range(1, len(starts) + 1):
                    cut.run(step, stage, None)
        except (Conflict, RequestError):
            raise
        except Exception:  # noqa: BLE001 - the stages are run with data then, and say whose the failure is
            return False
        return True

    def _run_on_cpu(self, starts: Sequence[str], stage: int, between: Collection[int]) -> None:
        """Run a stage with its own weights on two samples, and blocks of other stages without data.

        Raises:
            Conflict: it fails, or returns what has no data, and the whole model does not fail.
        """
        task = copied(self.task, _memo(self.task, starts, stage))
        modules, cut, here = ModuleMode(), Cut(task, starts, META), torch.device(HOST)
        modules.follow(task.model)
        reason = "what it returns has none"
        try:
            with seeded(0), torch.set_grad_enabled(self.step == "training_step"):
                output = cut.run(
                    self._step_on_cpu(task), stage, lambda _, wanted: torch.zeros_like(wanted, device=here)
                )
            lacks = any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_leaves(output))
        except (Conflict, RequestError):
            raise
        except Exception as error:  # noqa: BLE001 - what fails uncut, too, fails in the run, which reports it
            lacks, reason = self._whole_runs, str(error).partition("\n")[0].partition(". ")[0]
        if lacks:
            message = f"{modules.where} needs values of a tensor that another stage has ({reason})"
            raise Conflict(modules.active[-1], message, between)

    def _step_on_cpu(self, task: Task) -> Callable[[], Any]:
        return partial(getattr(task, self.step), tree_map_only(Tensor, Tensor.clone, self.batch_of(2)))

    @cached_property
    def costs(self) -> Costs:
        """What :meth:`run` returns of the whole model."""
        return self.run()

    @cached_property
    def batch(self) -> Any:
        """The batch to run."""
        return self.batch_of(self.size)

    @cached_property
    def _whole_runs(self) -> bool:
        """Whether the model runs on two samples before it is cut: if not, that comes again in the run."""
        task = copied(self.task, _memo(self.task, (), 0))
        try:
            with seeded(0), torch.set_grad_enabled(self.step == "training_step"):
                self._step_on_cpu(task)()
        except Exception:  # noqa: BLE001 - what fails for another reason fails in the run as well
            return False
        return True

    def _run(
        self,
        starts: Sequence[str],
        devices: Sequence[torch.device],
        prepare: Callable[[Task], Callable[[Any], object]],
        between: Collection[int] = (),
        here: int | None = None,
    ) -> Costs:
        """Run what ``prepare`` makes of a copy of the task.

        Args:
            between: a conflict's stages, if not the devices.
            here: the stage that is run, where it is one.
        """
        given, mode, costs = self.batch, new_mode(), Costs.of_weights(self.task.model)  # read before nothing has data
        counter = _Counter(costs, between)
        try:
            task = without_data(self.task, stages_of(self.task.model, starts, here), devices, mode)
            step = prepare(task)
            counter.follow(task.model)
            counter.seen.update((storage_key(tensor), tensor) for tensor in (*task.parameters(), *task.buffers()))
            with mode, torch.enable_grad(), saved_tensors_hooks(counter.save, lambda saved: saved):
                batch = fake_batch(given, devices[here or 0])
                with counter:
                    step(batch)
        except Exception as error:
            if isinstance(error, (Conflict, RequestError)) and not isinstance(error, Uncopied):
                raise
            named = stages_named(error)
            message = (str(error).splitlines() or [""])[0]
            if len(named) > 1:  # some operations find the mixture themselves, before the counter sees it
                raise counter.conflict(message, named) from None
            self.failure = (
                "what it does follows from values" if of_values(error) else f"{type(error).__name__}: {message}"
            )
            return Costs.of_weights(self.task.model)
        return costs


def _between(stage: int) -> tuple[int, int]:
    """Return the stages that a conflict in one is between."""
    return (max(stage, 1) - 1, max(stage, 1))


def _memo(task: Task, starts: Sequence[str], stage: int) -> dict[int, Any]:
    """Return what a copy of a task has in the place of its tensors: those of one stage, and no data of others."""
    stages = stages_of(task.model, starts, stage)
    memo: dict[int, Any] = {}
    for module in task.modules():
        own = stages.get(module, len(starts)) == stage
        for parameter in module.parameters(recurse=False):
            # Never the parameter itself: weak references of the copy to it (nn.LSTM) would stay, and it be fixed here.
            values = parameter.detach() if own else parameter.detach().to(META)
            memo[id(parameter)] = nn.Parameter(values, parameter.requires_grad)
            take_attributes(memo[id(parameter)], parameter)
        for buffer in (*module.buffers(recurse=False), *computed(module).values()):
            memo[id(buffer)] = buffer.detach().clone() if own else buffer.detach().to(META)
    return memo


class ModuleMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation, and which module's forward is running."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.active = [OUTSIDE]  # the names of the modules that are running, innermost last

    def follow(self, model: nn.Module) -> None:
        """Follow the modules of a model by hooks, which stay."""
        for name, module in model.named_modules():
            module.register_forward_pre_hook(partial(self._enter, name), prepend=True)
            module.register_forward_hook(self._leave)

    @property
    def where(self) -> str:
        """The block that is running, in words."""
        module = self.active[-1]
        return "the task's step" if module == OUTSIDE else f"the forward of {module or 'the model'}"

    def changed(self) -> None:
        """Another module is running."""

    def _enter(self, name: str, *_: Any) -> None:
        if current_node() is None:  # else it is run once more, for the backward pass
            self.active.append(name)
            self.changed()

    def _leave(self, *_: Any) -> None:
        if current_node() is None:
            self.active.pop()
            self.changed()


class _Counter(ModuleMode):  # type: ignore[no-untyped-call]
    """Counts the costs of operations and of what is kept for the backward pass; refuses a mixture of devices."""

    def __init__(self, costs: Costs, between: Collection[int]) -> None:
        from torch.utils.flop_counter import flop_registry  # with it comes Triton, which takes its time

        super().__init__()
        self.costs, self.between = costs, between
        self.operations_of = flop_registry
        self.seen: dict[int, Tensor] = {}  # by address of their memory: weights, and what is kept

    def conflict(self, operation: str, devices: Collection[int]) -> Conflict:
        """Return the error for an operation that mixes tensors on several devices."""
        stages = self.between or devices
        message = (
            f"{operation} in {self.where} mixes tensors of stage {min(stages)} and stage {max(stages)}, and only what "
            f"a block is called with is moved"
        )
        return Conflict(self.active[-1], message, stages)

    def save(self, tensor: Tensor) -> Tensor:
        """Count what autograd keeps, once."""
        key, module = storage_key(tensor), self.active[-1]
        if key not in self.seen and module != OUTSIDE:
            self.seen[key] = tensor
            self.costs.memory[module] += tensor.untyped_storage().nbytes()
        return tensor

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, module = kwargs or {}, self.active[-1]
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        stages = {tensor.device.index for tensor in inputs if is_accelerator(tensor.device)}
        if len(stages) > 1 and func not in MOVES:
            raise self.conflict(str(func), stages)
        output = func(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        if self.between and func in MOVES and 1 in stages and any(each.device.index == 0 for each in outputs):
            raise self.conflict(str(func), stages)  # to where it runs, of what has no data there
        if not func.is_view and module != OUTSIDE:
            count = self.operations_of.get(func.overloadpacket)
            operations = count(*args, **kwargs, out_val=output) if count is not None else 0
            moved = sum(tensor.nbytes for tensor in (*inputs, *outputs))
            self.costs.time[module] += max(operations // INTENSITY, moved)
        return output


STEPS = 3  # that count, after one that does not


def timed(dry_run: DryRun, device: torch.device, forward: Callable[[], AbstractContextManager[Any]]) -> dict[str, int]:
    """Return the nanoseconds that a step spends in each module itself, forward and in training backward.

    The median over a few steps of a copy of the task, which leave weights, buffers and random generators alone. Each
    forward pass runs in the context ``forward``.
    """
    steps = []
    try:
        with devices.random_kept([device]):
            found = (each for module in dry_run.task.modules() for each in computed(module).values())
            memo = {id(each): each.detach() for each in found}
            task = copy.deepcopy(dry_run.task, memo).to(device)
            batch = tree_map_only(Tensor, lambda each: each.to(device, copy=True), dry_run.batch)
            stopwatch = _Stopwatch(task.model, device)
            for _ in range(1 + STEPS):
                stopwatch.time = Counter()
                with stopwatch, torch.set_grad_enabled(dry_run.step == "training_step"):
                    with forward():
                        output = getattr(task, dry_run.step)(batch)
                    if dry_run.step == "training_step":
                        output.loss.backward()
                task.zero_grad()
                steps.append(stopwatch.time)
    except torch.OutOfMemoryError as error:
        raise RequestError(
            f"model.split=timed runs all of the model on {device}, where it does not fit "
            f"({str(error).splitlines()[0]}). Use model.split=auto, or give names."
        ) from None
    return {name: round(statistics.median(step[name] for step in steps[1:])) for name in steps[-1] if name != OUTSIDE}


class _Stopwatch(ModuleMode):  # type: ignore[no-untyped-call]
    """Times every operation, for the module whose forward it is in, or is the backward of.

    Autograd numbers its nodes as they come, so the numbers given out in a module's forward are that module's.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.time: Counter[str] = Counter()
        self.device = device
        self.numbers, self.names = [0], [OUTSIDE]  # of the first node since another module runs, and which one that is
        self.follow(model)

    def changed(self) -> None:
        self.numbers.append(next_sequence_number())
        self.names.append(self.active[-1])

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        node = current_node()
        begin = self._now()
        output = func(*args, **(kwargs or {}))
        took = self._now() - begin
        # What adds up gradients has a number beyond all others, and is nobody's.
        module = self.active[-1] if node is None else self.names[bisect_right(self.numbers, sequence_number(node)) - 1]
        self.time[module] += took
        return output

    def _now(self) -> int:
        devices.synchronize(self.device)
        return time.perf_counter_ns()
