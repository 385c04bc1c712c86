"""A batch through the stages of one process of a pipeline, micro-batch by micro-batch, without the other processes.

And the memory of each process, from a dry run of one after the other.

Messages are not sent. What is received is there without data, for as long as ``torch.distributed.pipelining`` keeps it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ddp_recipes._compat.dispatch import FakeTensorMode
from ddp_recipes.config.parallelism import PipelineShape
from ddp_recipes.model_parallel.pipeline import Pipeline, joined
from ddp_recipes.model_parallel.placement import META, Layout
from ddp_recipes.model_parallel.timeline import BACKWARD, FORWARD, Work, order, requested
from ddp_recipes.runtime.world import World
from ddp_recipes.strategies.base import Exchange
from ddp_recipes.strategies.collectives import in_buckets
from ddp_recipes.tasks import Task
from ddp_recipes.tasks.fake import new_mode, without_data
from ddp_recipes.tools.dry_run.backward import backward
from ddp_recipes.tools.dry_run.memory import Batches, DeviceMemory, Step
from ddp_recipes.tools.dry_run.memory_tracker import Bytes, Saved, forward

Key = tuple[int, int]  # a stage, and the number of a micro-batch


@dataclass
class _Passed:
    """A micro-batch that a stage has passed forward: what its backward pass needs.

    Attributes:
        received: leaves of its graph; ``roots`` are where backward begins.
        kept: bytes of its activations.
    """

    received: list[Tensor]
    roots: list[GradientEdge]
    kept: Bytes


class SimulatedPipeline(Pipeline):
    """The pipeline of one process, without the others.

    Args:
        known: memory that is no activation.
        accumulate: takes the gradient of a leaf.

    Attributes:
        activations: the most that autograd keeps at a time.
        sent: bytes that cross each cut in a training step, forward and backward.
    """

    def __init__(
        self,
        task: Task,
        layout: Layout,
        settings: PipelineShape,
        device: torch.device,
        precision: str,
        known: set[int],
        accumulate: Callable[[Tensor, Tensor], None],
    ) -> None:
        super().__init__(task, layout, settings.schedule, settings.micro_batches, None, device)
        self.settings = settings
        self.precision, self.known, self.accumulate = precision, known, accumulate
        self.activations = Bytes()
        self.sent: dict[int, tuple[int, int]] = {}

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Return a context that does nothing: a dry run draws no random numbers."""
        yield

    @contextmanager
    def _within(self, stage: int, number: int) -> Iterator[None]:
        with forward(self.device.type, self.precision, cached=False):
            yield

    def works(self) -> list[tuple[Work, list[Work]]]:
        """Return the work of this process, and before each piece what inputs it asks for.

        With ``1f1b`` what is there at a time shows in a few micro-batches: it repeats itself once it is under way.
        """
        settings = self.settings
        n, count = settings.processes, settings.micro_batches
        if self.training and settings.schedule == "1f1b":
            count = min(count, n + 2)
        orders = order(settings.schedule, settings.stages, n, count)
        works = orders[self.layout.process]
        needed = [[work] for work in works]
        if settings.each > 1:
            needed = requested(orders, settings.stages)[self.layout.process]
        return list(zip(works, needed, strict=True))

    def _schedule(self, crossing: Mapping[int, Sequence[Tensor]]) -> Callable[[], None]:
        if self.training:
            for cut, tensors in crossing.items():
                back = sum(each.nbytes for each in tensors if each.requires_grad)
                self.sent[cut] = (sum(each.nbytes for each in tensors) * self.micro_batches, back * self.micro_batches)
        return lambda: _Simulation(self, crossing).run()


class _Simulation:
    """One batch by the schedule, with what torch keeps at each time.

    A process keeps what it sends until it waits for it to have arrived: with ``gpipe`` after all forward passes, and
    after all backward passes; with ``1f1b`` before the next of its kind; with ``interleaved_1f1b`` after the backward
    pass of the same micro-batch, and at the end. What it received it keeps until the backward pass is done.
    """

    def __init__(self, pipeline: SimulatedPipeline, crossing: Mapping[int, Sequence[Tensor]]) -> None:
        self.pipeline, self.crossing, self.schedule = pipeline, crossing, pipeline.schedule
        self.received: dict[Work, list[Tensor]] = {}
        self.passed: dict[Key, _Passed] = {}
        self.outputs: dict[Key, list[Tensor]] = {}  # that are being sent
        self.gradients: list[list[Tensor | None]] = []  # likewise
        self.kept = Bytes()

    def run(self) -> None:
        """Run it."""
        for work, needed in self.pipeline.works():
            if work.kind == BACKWARD and self.schedule == "gpipe":
                self.outputs.clear()
            for each in needed:
                self.received[each] = self._memory(each)
            if work.kind == BACKWARD and self.schedule == "1f1b":
                self.outputs.clear()
            if work.kind == FORWARD:
                self._forward(work)
            elif self.pipeline.training:
                self._backward(work)
            if work.kind == BACKWARD:
                self.outputs.pop((work.stage, work.micro_batch), None)

    def _memory(self, work: Work) -> list[Tensor]:
        """Return memory for what a stage receives from the one before, or after it."""
        if work.kind == FORWARD:
            like = self.crossing.get(work.stage, ())
        else:
            like = [each for each in self.crossing.get(work.stage + 1, ()) if each.requires_grad]
        return [torch.empty_like(each, device=self.pipeline.device) for each in like]

    def _forward(self, work: Work) -> None:
        pipeline, key, received = self.pipeline, (work.stage, work.micro_batch), self.received.pop(work, [])
        for tensor, like in zip(received, self.crossing.get(work.stage, ()), strict=True):
            tensor.requires_grad_(like.requires_grad)
        saved = Saved(pipeline.known)
        with saved:
            given = pipeline.forward(work.stage, *received)
        outputs = given if isinstance(given, tuple) else (given,)
        self.kept += saved.bytes
        pipeline.activations |= self.kept
        roots = [get_gradient_edge(each) for each in outputs if each.requires_grad] if pipeline.training else []
        self.passed[key] = _Passed(received, roots, saved.bytes)
        if self.schedule == "1f1b":
            self.outputs.clear()
        self.outputs[key] = [each.detach() for each in outputs]

    def _backward(self, work: Work) -> None:
        passed, given = self.passed.pop((work.stage, work.micro_batch)), self.received.pop(work, [])
        if work.stage == self.pipeline.layout.stages - 1:
            given = [torch.ones((), device=self.pipeline.device)]  # of the loss
        roots = list(zip(passed.roots, given, strict=True))
        passed.roots.clear()
        with torch.no_grad():
            backward(roots, self.pipeline.accumulate)
        self.kept -= passed.kept
        if self.schedule == "1f1b":
            self.gradients.clear()
        self.gradients.append([each.grad for each in passed.received])
        for each in passed.received:
            each.grad = None


class Process(Step):
    """A step of one process of a pipeline, which has the weights of its own stages alone."""

    def __init__(
        self,
        task: Task,
        layout: Layout,
        settings: PipelineShape,
        device: torch.device,
        mode: FakeTensorMode,
        make_optimizer: Callable[[Task], torch.optim.Optimizer],
        precision: str,
        replicas: int,
    ) -> None:
        places = [device if stage in layout.mine else META for stage in range(layout.stages)]
        copied = without_data(task, layout.stages_of(task), places, mode)
        super().__init__(copied, [device], mode, Exchange(), make_optimizer, precision)
        self.replicas, self.reduced = replicas, 0
        with mode:
            self.pipeline = SimulatedPipeline(
                copied, layout, settings, device, self.precision, self.known, partial(self._take, False)
            )

    def _forward_backward(self, batch: Any, first: bool, last: bool) -> None:
        self.pipeline.run("training_step", batch)
        self.activations = self.pipeline.activations

    def _put(self) -> None:
        """Add up the gradients of replicas."""
        if self.replicas == 1:
            return
        marks = torch.empty(len(self.trained), dtype=torch.int32, device=self.devices[0])

        def reduce(tensor: Tensor) -> None:
            self.reduced += tensor.nbytes

        reduce(marks)
        in_buckets([each.grad for each in self.trained.values() if each.grad is not None], reduce)

    def _validate(self, batch: Any) -> None:
        outputs, sizes = self.pipeline.run("validation_step", batch)
        if outputs:
            joined(outputs, sizes)


class PipelineSteps:
    """A dry run of all processes of a replica, one after the other.

    Attributes:
        failure: of the first process that has one; ``unused`` are those of all.
        reduced: bytes that each process gives to all-reduces in a step.
        passed: bytes that cross each cut in a batch, forward and backward; ``None`` where that is not known.
    """

    whole = False

    def __init__(
        self,
        task: Task,
        starts: Sequence[str],
        device: torch.device,
        settings: PipelineShape,
        world: World,
        make_optimizer: Callable[[Task], torch.optim.Optimizer],
        batches: Batches,
        precision: str,
    ) -> None:
        self.mode = mode = new_mode()
        replicas = world.world_size // settings.processes
        self.processes: list[Process] = []
        for number in range(settings.processes):
            layout = Layout(starts, settings.processes, number)
            process = Process(task, layout, settings, device, mode, make_optimizer, precision, replicas)
            process.run(batches)
            self.processes.append(process)
        self.failure = next((each.failure for each in self.processes if each.failure is not None), None)
        self.unused = [name for each in self.processes for name in each.unused]
        self.reduced = [each.reduced for each in self.processes]
        crossing = {cut: sent for each in self.processes for cut, sent in each.pipeline.sent.items()}
        self.passed = None if self.failure else [crossing[cut] for cut in sorted(crossing)]

    def memory(self) -> list[DeviceMemory]:
        """Return what each process holds."""
        return [memory for each in self.processes for memory in each.memory()]

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint has of model and optimizer, put together of all processes'."""
        weights: dict[str, Tensor] = {}
        optimizer: dict[str, Any] = {}
        state: dict[int, Any] = {}
        for each in self.processes:
            mine = each.task.weights()
            weights |= {name: value for name, value in mine.items() if value.device != META or name not in weights}
            optimizer = each.optimizer.state_dict()
            state |= optimizer["state"]
        return {"model": weights, "optimizer": {**optimizer, "state": dict(sorted(state.items()))}}
