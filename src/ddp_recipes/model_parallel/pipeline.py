"""Steps of a task whose model is cut into stages, some of which are in this process."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_recipes._compat.modules import buffers_of, share_tensors
from ddp_recipes._compat.pytree import tree_leaves
from ddp_recipes.model_parallel.cut import Cut, Handover, parts_of
from ddp_recipes.model_parallel.dry_run import without_data
from ddp_recipes.model_parallel.placement import stages_of
from ddp_recipes.runtime.seeding import key, seed_step
from ddp_recipes.tasks import StepOutput, Task

META = torch.device("meta")
KEPT = 16  # forms of batches (shapes of tensors) for which buffers are kept

STEPS = ("training_step", "validation_step", "predict_step")
SCHEDULES = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "interleaved_1f1b": "ScheduleInterleaved1F1B"}


@dataclass(frozen=True)
class Layout:
    """Which stages are where: stage s in process s modulo ``processes``."""

    starts: Sequence[str]
    processes: int
    process: int

    @property
    def stages(self) -> int:
        """How many there are, over all processes."""
        return len(self.starts) + 1

    @property
    def mine(self) -> range:
        """Those of this process."""
        return range(self.process, self.stages, self.processes)

    @property
    def has_last(self) -> bool:
        """Whether this process has the last stage, hence losses and outputs."""
        return self.stages - 1 in self.mine

    def owners(self, task: Task) -> dict[nn.Module, int]:
        """Return the process of each module's own parameters and buffers; those around the model are in the last."""
        stages = stages_of(task.model, self.starts)
        return {module: stages.get(module, self.stages - 1) % self.processes for module in task.modules()}


def keep_own(task: Task, layout: Layout, device: torch.device) -> None:
    """Put the stages of this process on its device, and leave of the others names and shapes.

    Parameters stay the same objects: an optimizer that has all of them steps those that get gradients.
    """
    for module, owner in layout.owners(task).items():
        place = device if owner == layout.process else META
        for parameter in module.parameters(recurse=False):
            if parameter.device != place:
                moved = nn.Parameter(parameter.detach().to(place), parameter.requires_grad)
                torch.utils.swap_tensors(parameter, moved)  # type: ignore[no-untyped-call]
        buffers = buffers_of(module)
        for name, buffer in buffers.items():
            if buffer is not None:
                buffers[name] = buffer.to(place)


@dataclass
class _Prepared:
    """What a form of batch needs: a schedule to run, and the tensors that cross each cut, flat and without data."""

    schedule: Callable[[], None]
    crossing: dict[int, list[Tensor]]


class Pipeline:
    """Runs steps in micro-batches through the stages of one replica, in the order of a schedule.

    Between processes go flat tensors, long enough for the largest micro-batch: who receives them knows their shapes.

    Args:
        task: is left with the stages of this process.
        group: the processes of this replica; ``None`` where no other one is asked.
    """

    def __init__(
        self,
        task: Task,
        layout: Layout,
        schedule: str,
        micro_batches: int,
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self.task, self.layout, self.schedule, self.micro_batches = task, layout, schedule, micro_batches
        self.group, self.device = group, device
        self.shapes = without_data(task, (), (META,), nullcontext())
        keep_own(task, layout, device)
        alone = len(layout.mine) == 1
        self.tasks = {stage: task if alone else self._with_only(stage) for stage in layout.mine}
        self.steps = {stage: {name: getattr(each, name) for name in STEPS} for stage, each in self.tasks.items()}
        self.cuts = {stage: Cut(each, layout.starts, META) for stage, each in self.tasks.items()}
        self.shapes_cut = Cut(self.shapes, layout.starts, META, remember=False)
        self._prepared: dict[Any, _Prepared] = {}

    def _with_only(self, stage: int) -> Task:
        """Return a copy of the task that has one stage of this process, the very same tensors, and no other."""
        view = without_data(self.shapes, (), (META,), nullcontext())
        stages = stages_of(self.task.model, self.layout.starts)
        for module, copied in zip(self.task.modules(), view.modules(), strict=True):
            if stages.get(module, self.layout.stages - 1) == stage:
                share_tensors(module, copied)
        return view

    def _take_buffers(self) -> None:
        """Take back buffers that a stage has put a new tensor in the place of."""
        for view in self.tasks.values():
            for module, copied in zip(self.task.modules(), view.modules(), strict=True):
                for name, buffer in buffers_of(copied).items():
                    if buffer is not None and not buffer.is_meta:
                        buffers_of(module)[name] = buffer

    def run(self, step: str, batch: Any, share: float = 1.0) -> tuple[list[Any], list[int]]:
        """Run a step of the task in micro-batches, in training with the backward pass of each.

        Args:
            step: a method of the task.
            share: the mean loss over the batch is multiplied with it.

        Returns:
            What the step returned for each micro-batch that has samples, and their numbers of samples; nothing in a
            process without the last stage.
        """
        self._step = step
        self._parts, self._sizes = parts_of(batch, self.micro_batches)
        self._share = share / sum(self._sizes)
        shapes = [(leaf.shape, leaf.dtype) for leaf in tree_leaves(self._parts) if isinstance(leaf, Tensor)]
        self._form = (step, self.task.training, *shapes[: len(shapes) // self.micro_batches])
        self._outputs: list[Any] = []
        self._numbers = dict.fromkeys(self.layout.mine, 0)
        self._failure: BaseException | None = None
        for each in self.tasks.values():
            if each.training != self.task.training:
                each.train(self.task.training)
        self._now = self._prepare()
        with self._apart():
            try:
                self._now.schedule()
            except RuntimeError:
                if self._failure is not None:  # torch puts a message of its own in its place
                    raise self._failure from None
                raise
        if len(self.tasks) > 1:
            self._take_buffers()
        return self._outputs, [size for size in self._sizes if size] if self.layout.has_last else []

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Leave the random numbers of others alone, and cast in forward passes only."""
        self._seed = int(torch.randint(2**62, ()))
        kind = self.device.type
        self._autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        cuda = [self.device] if kind == "cuda" else []
        with torch.random.fork_rng(devices=cuda), torch.autocast(kind, enabled=False):
            yield

    @contextmanager
    def _within(self, stage: int, number: int) -> Iterator[None]:
        """Seed and cast a forward pass."""
        seed_step(key(self._seed, stage, number), [self.device])  # no stage draws what another one does
        on, dtype = self._autocast
        with torch.autocast(self.device.type, dtype, enabled=on, cache_enabled=False):
            yield

    def forward(self, stage: int, *received: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Run a stage on its next micro-batch, for the schedule.

        Args:
            received: what crosses the cut before it, flat.

        Returns:
            What crosses the next cut, flat; of the last stage its loss, weighted.
        """
        number = self._numbers[stage]
        self._numbers[stage] += 1
        try:
            return self._run_stage(stage, number, received)
        except BaseException as error:
            self._failure = error
            raise

    def _run_stage(self, stage: int, number: int, received: Sequence[Tensor]) -> Tensor | tuple[Tensor, ...]:
        size, last = self._sizes[number], stage == self.layout.stages - 1
        handed = [] if last else self._now.crossing[stage + 1]
        if size == 0:  # a small batch has fewer samples than micro-batches
            nothing = [torch.zeros_like(flat, device=self.device).requires_grad_(flat.requires_grad) for flat in handed]
            return torch.zeros((), device=self.device, requires_grad=self.task.training) if last else tuple(nothing)

        def receive(at: int, wanted: Tensor) -> Tensor:
            tensor = received[at][: wanted.numel()].view(wanted.shape)
            return tensor.clone() if tensor.requires_grad else tensor  # a block may work in place

        with self._within(stage, number):
            call = partial(self.steps[stage][self._step], self._parts[number])
            output = self.cuts[stage].run(call, stage, receive, (self._form, size))
        if isinstance(output, Handover):
            return tuple(_flat(tensor, flat) for tensor, flat in zip(output.tensors, handed, strict=True))
        if not self.training:
            self._outputs.append(output)
            return torch.zeros((), device=self.device)
        self._outputs.append(output._replace(loss=output.loss.detach()))
        loss: Tensor = output.loss * (size * self._share)
        return loss

    @property
    def training(self) -> bool:
        """Whether the step that runs has a backward pass."""
        return self._step == "training_step"

    def _prepare(self) -> _Prepared:
        """Return what batches of this form need."""
        if self._form not in self._prepared:
            if len(self._prepared) == KEPT:
                del self._prepared[next(iter(self._prepared))]
            self._prepared[self._form] = self._make()
        return self._prepared[self._form]

    def _make(self) -> _Prepared:
        layout, own = self.layout, self.layout.mine
        crossing = {cut: self._crossing(cut) for stage in own for cut in (stage, stage + 1) if 0 < cut < layout.stages}
        return _Prepared(self._schedule(crossing), crossing)

    def _schedule(self, crossing: Mapping[int, Sequence[Tensor]]) -> Callable[[], None]:
        """Return what runs :meth:`forward`, and backward, for all micro-batches and stages: torch's schedule.

        Args:
            crossing: tensors like those that cross each cut.
        """
        from torch.distributed import pipelining

        layout, nothing = self.layout, [torch.empty((), device=META)]
        stages = [
            pipelining.PipelineStage(
                _StageModule(self, stage),
                stage,
                layout.stages,
                self.device,
                input_args=tuple(crossing.get(stage, [torch.zeros(1, dtype=torch.int64)])),
                output_args=tuple(crossing.get(stage + 1, nothing)),
                group=self.group,
            )
            for stage in layout.mine
        ]
        # The stages' losses are weighted already, and the last stage's output is its loss.
        schedule = getattr(pipelining, SCHEDULES[self.schedule])(
            stages if self.schedule.startswith("interleaved") else stages[0],
            self.micro_batches,
            loss_fn=(lambda loss, _: loss) if self.training else None,
            scale_grads=False,
        )

        def run() -> None:
            # Micro-batches come to the stages by their numbers: torch hands on no more than these.
            numbers = torch.arange(self.micro_batches)
            first = (numbers,) if 0 in layout.mine else ()
            schedule.step(*first, target=numbers if layout.has_last else None, return_outputs=False)
            for stage in stages:
                stage.clear_runtime_states()  # without a backward pass they keep what they have received

        return run

    def _crossing(self, cut: int) -> list[Tensor]:
        """Return what crosses a cut for the largest micro-batch, flat and without data."""
        self.shapes.train(self.task.training)
        step = partial(getattr(self.shapes, self._step), self._parts[0])
        with torch.set_grad_enabled(self.training):
            handover = self.shapes_cut.run(step, cut, None)
        return [
            torch.empty(tensor.numel(), dtype=tensor.dtype, device=META, requires_grad=tensor.requires_grad)
            for tensor in handover.tensors
        ]


def _flat(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a tensor flat, as long as ``like`` and of its type: what autocast has made 16 bits is sent in 32."""
    assert tensor.numel() <= like.numel(), (
        f"{list(tensor.shape)} is more than what {like.numel()} numbers were kept for"
    )
    return F.pad(tensor.reshape(-1).to(like.dtype), (0, like.numel() - tensor.numel()))


class _StageModule(nn.Module):
    """A stage as torch's schedules call it."""

    def __init__(self, pipeline: Pipeline, stage: int) -> None:
        super().__init__()
        self.call = partial(pipeline.forward, stage)

    def forward(self, *received: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self.call(*received)


def joined(outputs: Sequence[StepOutput], sizes: Sequence[int]) -> StepOutput:
    """Return the output of a batch from those of its micro-batches."""
    total = sum(sizes)

    def join(values: Sequence[Tensor]) -> Tensor:
        if values[0].dim():
            return torch.cat(list(values))
        return torch.stack([value * (size / total) for value, size in zip(values, sizes, strict=True)]).sum()

    metrics = {name: join([output.metrics[name] for output in outputs]) for name in outputs[0].metrics}
    return StepOutput(join([output.loss for output in outputs]), metrics, total)
