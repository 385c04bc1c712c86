"""A step of all processes of a replica, each run without data and without the others.

In a pipeline a batch goes through the stages of a process micro-batch by micro-batch. Messages are not sent; what is
received is there without data, for as long as ``torch.distributed.pipelining`` keeps it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ddp_recipes._compat.dispatch import FakeTensorMode
from ddp_recipes.build.recipe import Recipe
from ddp_recipes.config.parallelism import PipelineShape
from ddp_recipes.devices import HOST, fake_devices
from ddp_recipes.model_parallel.pipeline import Pipeline, joined
from ddp_recipes.model_parallel.placement import META, Layout
from ddp_recipes.model_parallel.timeline import BACKWARD, FORWARD, Work, order, requested
from ddp_recipes.strategies.base import Exchange
from ddp_recipes.strategies.collectives import in_buckets
from ddp_recipes.tasks.fake import new_mode, without_data
from ddp_recipes.tools.dry_run.backward import backward
from ddp_recipes.tools.dry_run.memory import FIGURES, Bytes, Saved, Step, step_of_replica

Key = tuple[int, int]  # a stage, and the number of a micro-batch
MARK = torch.int32  # whether a process has a gradient of a parameter


@dataclass(frozen=True)
class Replica:
    """What was found of a replica.

    Attributes:
        steps: of its process, or of each process of a pipeline.
        whole: whether it spans several devices, and they are counted as one.
    """

    steps: Sequence[Step]
    whole: bool

    @property
    def failure(self) -> str | None:
        """Why a step of the first process that has a failure could not be run."""
        return next((each.failure for each in self.steps if each.failure is not None), None)

    @property
    def unused(self) -> list[str]:
        """Parameters that are trained and get no gradient."""
        return [name for each in self.steps for name in each.unused]

    @cached_property
    def memory(self) -> list[dict[str, int]]:
        """What each device holds, by the names of a step's figures, and the ``peak`` of both kinds of steps."""
        found = [
            {name: step.figures[name][device] for name in FIGURES} for step in self.steps for device in step.devices
        ]
        return [{**each, "peak": max(each["training"], each["validation"])} for each in found]

    @property
    def peak(self) -> int:
        """That of the fullest device."""
        return max(each["peak"] for each in self.memory)


def shape_of(recipe: Recipe) -> PipelineShape:
    """Return the stages of a replica: those that its processes hold, or the devices of its one process."""
    k, micro_batches = recipe.request.num_devices, recipe.request.model.micro_batches
    of_devices = PipelineShape("gpipe", k, k, micro_batches, "model.num_devices", "model.micro_batches")
    return recipe.request.strategy.pipeline or of_devices


def run_step(recipe: Recipe) -> Replica:
    """Run a step of the recipe without data, on the devices of one replica.

    A model that places itself knows no devices but those it was made for, and the CPU has one memory for each process:
    then all that a process has is on one device.
    """
    train, pipeline, k = recipe.loaders["train"], recipe.request.strategy.pipeline, recipe.request.num_devices
    batch = train.sample(train.plan.size(0, 0))
    val = [each.sample(each.plan.size(0, 0)) for each in recipe.val.values()]
    starts, mode = [stage.first for stage in recipe.built.stages[1:]], new_mode()
    host, steps = recipe.devices.type == HOST, list[Step]()
    together = pipeline is None and (host or (k > 1 and not starts))
    if pipeline is not None:
        device = torch.device(HOST) if host else fake_devices(1)[0]
        layouts = [Layout(starts, pipeline.processes, number) for number in range(pipeline.processes)]
        steps += [PipelineStep(recipe, layout, device, mode) for layout in layouts]
    elif together:
        steps.append(step_of_replica(recipe, [], [torch.device(HOST)], mode))
    else:
        steps.append(step_of_replica(recipe, starts, fake_devices(len(starts) + 1), mode))
    for step in steps:
        step.run(batch, val)
    return Replica(steps, whole=together and k > 1)


# --- stages of a pipeline --------------------------------------------------------------------------------------------


class PipelineStep(Step):
    """A step of one process of a pipeline, which has the weights of its own stages alone."""

    def __init__(self, recipe: Recipe, layout: Layout, device: torch.device, mode: FakeTensorMode) -> None:
        places = [device if stage in layout.mine else META for stage in range(layout.stages)]
        copied = without_data(recipe.task, layout.stages_of(recipe.task), places, mode)
        super().__init__(recipe, copied, [device], mode, Exchange())
        shape = recipe.request.strategy.pipeline
        assert shape is not None
        with mode:
            self.pipeline = SimulatedPipeline(self, layout, shape)

    @property
    def reduced(self) -> int:
        """Bytes that it gives to all-reduces in a step, once it was run: a gradient and a mark for each parameter."""
        if self.recipe.world.world_size == self.pipeline.layout.processes:
            return 0
        trained = {name.removeprefix("model."): each.nbytes for name, each in self.trained.items()}
        return len(trained) * MARK.itemsize + sum(size for name, size in trained.items() if name not in self.unused)

    def _forward_backward(self, batch: Any, first: bool, last: bool) -> None:
        self.pipeline.run("training_step", batch)
        self.figures["activations"] = self.pipeline.activations

    def _put(self) -> None:
        """Add up the gradients of replicas, after marks of which there are."""
        if self.reduced:
            marks = torch.empty(len(self.trained), dtype=MARK, device=self.devices[0])
            in_buckets([each.grad for each in self.trained.values() if each.grad is not None], lambda bucket: None)
            del marks  # no sooner

    def _validate(self, batch: Any) -> None:
        outputs, sizes = self.pipeline.run("validation_step", batch)
        if outputs:
            joined(outputs, sizes)


class SimulatedPipeline(Pipeline):
    """The pipeline of one process, without the others.

    Attributes:
        activations: the most that autograd keeps at a time.
        sent: bytes that cross each cut in a training step, forward and backward.
    """

    def __init__(self, process: PipelineStep, layout: Layout, shape: PipelineShape) -> None:
        super().__init__(process.task, layout, shape.schedule, shape.micro_batches, None, process.devices[0])
        self.process = process
        self.activations = Bytes()
        self.sent: dict[int, tuple[int, int]] = {}

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Return a context that does nothing: a dry run draws no random numbers."""
        yield

    @contextmanager
    def _within(self, stage: int, number: int) -> Iterator[None]:
        with self.process.forward_context(cached=False):
            yield

    def works(self) -> Iterator[tuple[Work, list[Work]]]:
        """Yield the work of this process, and before each piece what inputs it asks for.

        With ``1f1b`` what is there at a time shows in a few micro-batches: it repeats itself once it is under way.
        """
        layout, count = self.layout, self.micro_batches
        if self.training and self.schedule == "1f1b":
            count = min(count, layout.processes + 2)
        orders = order(self.schedule, layout.stages, layout.processes, count)
        works = orders[layout.process]
        needed = [[work] for work in works]
        if len(layout.mine) > 1:
            needed = requested(orders, layout.stages)[layout.process]
        return zip(works, needed, strict=True)

    def _schedule(self, crossing: Mapping[int, Sequence[Tensor]]) -> Callable[[], None]:
        if self.training:
            for cut, tensors in crossing.items():
                back = sum(each.nbytes for each in tensors if each.requires_grad)
                self.sent[cut] = (sum(each.nbytes for each in tensors) * self.micro_batches, back * self.micro_batches)
        return lambda: _Simulation(self, crossing).run()


class _Passed(NamedTuple):
    """A micro-batch that a stage has passed forward: what its backward pass needs."""

    received: list[Tensor]  # leaves of its graph
    roots: list[GradientEdge]  # where backward begins
    kept: Bytes  # by its activations


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
        saved = Saved(pipeline.process.known)
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
            backward(roots, partial(self.pipeline.process.take, False))
        self.kept -= passed.kept
        if self.schedule == "1f1b":
            self.gradients.clear()
        self.gradients.append([each.grad for each in passed.received])
        for each in passed.received:
            each.grad = None
