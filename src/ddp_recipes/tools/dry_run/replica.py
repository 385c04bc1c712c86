"""A step of all processes of a replica, each run without data."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from ddp_recipes.build.recipe import Recipe
from ddp_recipes.config.parallelism import PipelineShape
from ddp_recipes.devices import HOST, fake_devices
from ddp_recipes.model_parallel.placement import Layout
from ddp_recipes.tasks.fake import new_mode
from ddp_recipes.tools.dry_run.memory import FIGURES, Step, step_of_replica
from ddp_recipes.tools.dry_run.simulation import PipelineStep


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
