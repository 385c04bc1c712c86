"""Steps of a task whose model is cut into stages, some of which are in this process."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from traceback import walk_tb
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_recipes._compat.model_parallel import share_tensors, wait_for_messages_by
from ddp_recipes._compat.torch_ import buffers_of, tree_leaves
from ddp_recipes.devices import random_kept
from ddp_recipes.errors import RecipeError, chain
from ddp_recipes.model_parallel.cut import SAME_WAY, Crossing, Cut, Given
from ddp_recipes.model_parallel.micro_batches import as_dict, micro_batches_of
from ddp_recipes.model_parallel.placement import META, Conflict, Layout, keep_own
from ddp_recipes.runtime.seeding import key, restored, seed_step, seeded
from ddp_recipes.tasks import StepOutput, Task
from ddp_recipes.tasks.fake import without_data
from ddp_recipes.tasks.task import checked

MAX_FORMS = 16  # of batches (shapes of tensors), for which buffers are kept

SCHEDULES = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "interleaved_1f1b": "ScheduleInterleaved1F1B"}


@dataclass
class _Prepared:
    """What a form of batch needs."""

    schedule: Callable[[], None]  # runs all micro-batches
    crossing: dict[int, Crossing]  # of each cut; its tensors are flat and without data
    given: defaultdict[tuple[int, int], Given] = field(default_factory=lambda: defaultdict(list))
    """What blocks of earlier stages give, by stage and size of the micro-batch."""


class Pipeline:
    """Runs steps in micro-batches through the stages of one replica, in the order of a schedule.

    Between processes go flat tensors, long enough for the largest micro-batch: who receives them knows their shapes.

    Args:
        task: is left with the stages of this process.
        group: the processes of this replica; ``None`` where nothing is sent.
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
        self.wait: Callable[[dist.Work, int], object] | None = None  # for a message of so many bytes; None: as torch
        self.shapes = without_data(task, {}, (META,), nullcontext())
        keep_own(task, layout, device)
        self._copied: list[tuple[nn.Module, nn.Module]] = []  # a module of the task, and the one that a stage runs
        alone = len(layout.mine) == 1
        self.tasks = {stage: task if alone else self._with_only(stage) for stage in layout.mine}
        self.cuts = {stage: Cut(each, layout.starts, META) for stage, each in self.tasks.items()}
        self.shapes_cut = Cut(self.shapes, layout.starts, META)
        self._prepared: dict[Any, _Prepared] = {}

    def set_group(self, group: dist.ProcessGroup | None) -> None:
        """Go on among the processes of another group, from the buffers that the task has."""
        self.group = group
        self._prepared.clear()
        vars(self).pop("_now", None)
        for module, copied in self._copied:
            share_tensors(module, copied)

    def _with_only(self, stage: int) -> Task:
        """Return a copy of the task that has one stage of this process, the very same tensors, and no other."""
        view = without_data(self.shapes, {}, (META,), nullcontext())
        for (module, own), copied in zip(self.layout.stages_of(self.task, stage).items(), view.modules(), strict=True):
            if own == stage:
                share_tensors(module, copied)
                self._copied.append((module, copied))
        return view

    def run(self, step: str, batch: Any, weight: float = 1.0) -> tuple[list[Any], list[int]]:
        """Run a step of the task in micro-batches, in training with the backward pass of each.

        Args:
            weight: multiplies the mean loss over the batch.

        Returns:
            The outputs of micro-batches with samples, and their sizes; nothing in a process without the last stage.
        """
        self._step = step
        self._inputs, self._sizes = micro_batches_of(as_dict(batch), self.micro_batches, "the data give")
        self._weight = weight / sum(self._sizes)
        shapes = [(leaf.shape, leaf.dtype) for leaf in tree_leaves(self._inputs[0]) if isinstance(leaf, Tensor)]
        self._form = (step, self.task.training, *shapes)
        self._outputs: list[Any] = []
        self._numbers = dict.fromkeys(self.layout.mine, 0)
        for each in self.tasks.values():
            self._take_modes(each)
        self._now = self._prepare()
        with self._apart():
            self._run_schedule()
        for module, copied in self._copied:  # a stage may have put a new tensor in a buffer's place
            buffers_of(module).update(buffers_of(copied))
        return self._outputs, [size for size in self._sizes if size] if self.layout.has_last else []

    def _take_modes(self, copied: Task) -> None:
        """Put each module of a copy in the mode of the task's own: a part of a task may be in another one than all."""
        for module, own in zip(self.task.modules(), copied.modules(), strict=True):
            if own.training != module.training:
                own.training = module.training

    def _run_schedule(self) -> None:
        """Run all micro-batches; raise what a stage raised, in whose place torch puts an error of its own."""
        failure: BaseException | None = None
        try:
            self._now.schedule()
        except Exception as error:  # noqa: BLE001 - raised below, whatever it is
            failure = next((each for each in chain(error) if not _by_schedule(each)), error)
        if failure is None:
            return
        if isinstance(failure, Conflict):
            raise RecipeError(f"{failure}. Use a strategy without stages, as ddp.") from None
        try:
            raise failure  # not where torch's is handled, which came of it: each would be what the other one came of
        finally:
            del failure

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Leave the random numbers of others alone, and cast in forward passes only."""
        self._seed = int(torch.randint(2**62, ()))
        kind = self.device.type
        self._autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        with restored(), random_kept([self.device]), torch.autocast(kind, enabled=False):
            yield

    @contextmanager
    def _within(self, stage: int, number: int) -> Iterator[None]:
        """Seed and cast a forward pass."""
        seed_step(key(self._seed, stage, number), [self.device])  # no stage draws what another one does
        on, dtype = self._autocast
        with torch.autocast(self.device.type, dtype, enabled=on, cache_enabled=False):
            yield

    def forward(self, stage: int, *received: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Run a stage on its next micro-batch: from what crosses the cut before it, flat, to what crosses the next.

        Of the last stage that is its loss, weighted.
        """
        number = self._numbers[stage]
        self._numbers[stage] += 1
        size, last = self._sizes[number], stage == self.layout.stages - 1
        sent = [] if last else self._now.crossing[stage + 1].tensors
        if size == 0:  # a small batch has fewer samples than micro-batches
            nothing = [torch.zeros_like(flat, device=self.device).requires_grad_(flat.requires_grad) for flat in sent]
            return torch.zeros((), device=self.device, requires_grad=self.task.training) if last else tuple(nothing)

        def receive(at: int, wanted: Tensor) -> Tensor:
            tensor = received[at][: wanted.numel()].view(wanted.shape)
            return tensor.clone() if tensor.requires_grad else tensor  # a block may work in place

        with self._within(stage, number):
            call = self._call(self.tasks[stage], self._inputs[number])
            output = self.cuts[stage].run(call, stage, receive, self._now.given[stage, size])
        if stage > 0:
            self._refuse_another_way(stage, self.cuts[stage].entered)
        if isinstance(output, Crossing):
            self._refuse_another_way(stage + 1, output.block)
            return tuple(_flat(tensor, flat) for tensor, flat in zip(output.tensors, sent, strict=True))
        if self._step != "predict_step":
            output = checked(output, getattr(type(self.task), self._step))
        if not self.training:
            self._outputs.append(output)
            return torch.zeros((), device=self.device)
        self._outputs.append(output._replace(loss=output.loss.detach()))
        loss: Tensor = output.loss * (size * self._weight)
        return loss

    def _refuse_another_way(self, stage: int, block: str) -> None:
        """Refuse a step that comes to a stage by another block than the process before, or after, takes it to."""
        if block != (planned := self._now.crossing[stage].block):
            raise Conflict(block, f"stage {stage} begins at {block} here, at {planned} elsewhere: {SAME_WAY}", (stage,))

    @property
    def training(self) -> bool:
        """Whether the step that runs has a backward pass."""
        return self._step == "training_step"

    def _prepare(self) -> _Prepared:
        """Return what batches of this form need."""
        if self._form not in self._prepared:
            if len(self._prepared) == MAX_FORMS:
                del self._prepared[next(iter(self._prepared))]
            cuts = {cut for stage in self.layout.mine for cut in (stage, stage + 1) if 0 < cut < self.layout.stages}
            crossing = {cut: self._crossing(cut) for cut in sorted(cuts)}
            schedule = self._schedule({cut: each.tensors for cut, each in crossing.items()})
            self._prepared[self._form] = _Prepared(schedule, crossing)
        return self._prepared[self._form]

    def _schedule(self, crossing: Mapping[int, Sequence[Tensor]]) -> Callable[[], None]:
        """Return what runs :meth:`forward`, and backward, for all micro-batches and stages: torch's schedule."""
        from torch.distributed import pipelining

        layout, nothing = self.layout, [torch.empty((), device=META)]
        stages = [
            pipelining.PipelineStage(
                _StageModule(partial(self.forward, stage)),
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

        longest = max((each.nbytes for tensors in crossing.values() for each in tensors), default=0)

        def run() -> None:
            if (wait := self.wait) is not None:
                wait_for_messages_by(lambda handle: wait(handle, longest))
            # Micro-batches come to the stages by their numbers: torch hands on no more than these.
            numbers = torch.arange(self.micro_batches)
            first = (numbers,) if 0 in layout.mine else ()
            schedule.step(*first, target=numbers if layout.has_last else None, return_outputs=False)
            for stage in stages:
                stage.clear_runtime_states()  # without a backward pass they keep what they have received

        return run

    def _call(self, task: Task, inputs: Any) -> Callable[[], Any]:
        """Return a call of the step as its class has it: that of the task itself may run this pipeline."""
        return partial(getattr(type(task), self._step), task, inputs)

    def _crossing(self, cut: int) -> Crossing:
        """Return what crosses a cut for the largest micro-batch, flat and without data."""
        self._take_modes(self.shapes)
        with seeded(0), torch.set_grad_enabled(self.training):  # so that the processes on both sides draw the same
            try:
                found: Crossing = self.shapes_cut.run(self._call(self.shapes, self._inputs[0]), cut, None)
            except Exception as error:
                error.add_note(
                    f"What is before stage {cut} runs without data here. Whether the model itself fails, a run without "
                    f"stages shows."
                )
                raise
        flat = [
            torch.empty(tensor.numel(), dtype=tensor.dtype, device=META, requires_grad=tensor.requires_grad)
            for tensor in found.tensors
        ]
        return Crossing(flat, found.block)


def _flat(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a tensor flat, as long as ``like`` and of its type: what autocast has made 16 bits is sent in 32."""
    assert tensor.numel() <= like.numel(), f"{list(tensor.shape)} does not fit into {like.numel()} numbers"
    return F.pad(tensor.reshape(-1).to(like.dtype), (0, like.numel() - tensor.numel()))


def _by_schedule(error: BaseException) -> bool:
    """Whether an error was raised by torch's pipelines themselves, not by what they call."""
    from torch.distributed import pipelining

    files = [frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__)]
    return bool(files) and Path(files[-1]).is_relative_to(Path(pipelining.__file__).parent)


class _StageModule(nn.Module):
    """A stage as torch's schedules call it."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = forward


def joined(outputs: Sequence[StepOutput], sizes: Sequence[int]) -> StepOutput:
    """Return the output of a batch from those of its micro-batches."""
    total = sum(sizes)

    def join(values: Sequence[Tensor]) -> Tensor:
        if values[0].dim():
            return torch.cat(list(values))
        return torch.stack([value * (size / total) for value, size in zip(values, sizes, strict=True)]).sum()

    metrics = {name: join([output.metrics[name] for output in outputs]) for name in outputs[0].metrics}
    return StepOutput(join([output.loss for output in outputs]), metrics, total)
