"""A batch through the stages of one process of a pipeline, micro-batch by micro-batch, without the other processes.

Messages are not sent. What is received is there without data, for as long as ``torch.distributed.pipelining`` keeps it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ddp_recipes.config.parallelism import PipelineShape
from ddp_recipes.model_parallel.layout import Layout
from ddp_recipes.model_parallel.pipeline import Pipeline
from ddp_recipes.model_parallel.timeline import BACKWARD, FORWARD, Work, order, requested
from ddp_recipes.tasks import Task
from ddp_recipes.tools.dry_run.backward import backward
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
