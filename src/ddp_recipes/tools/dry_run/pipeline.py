"""Memory of each process of a pipeline, from a dry run of one process after the other."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ddp_recipes._compat.dispatch import FakeTensorMode
from ddp_recipes.config.parallelism import PipelineShape
from ddp_recipes.model_parallel.layout import META, Layout
from ddp_recipes.model_parallel.pipeline import joined
from ddp_recipes.runtime.world import World
from ddp_recipes.strategies.base import Exchange
from ddp_recipes.strategies.collectives import in_buckets
from ddp_recipes.tasks import Task
from ddp_recipes.tasks.fake import new_mode, without_data
from ddp_recipes.tools.dry_run.memory import Batches, DeviceMemory, Step
from ddp_recipes.tools.dry_run.simulation import SimulatedPipeline


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
