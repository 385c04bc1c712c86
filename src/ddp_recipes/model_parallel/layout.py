"""Which stages of a pipeline are in which process."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ddp_recipes._compat.model_parallel import move_own
from ddp_recipes.model_parallel.placement import stages_of
from ddp_recipes.tasks import Task
from ddp_recipes.tasks.fake import computed

META = torch.device("meta")


@dataclass(frozen=True)
class Layout:
    """Which stages are where: stage s in process s modulo ``processes``."""

    starts: Sequence[str]
    processes: int
    process: int

    @property
    def stages(self) -> int:
        """The number of stages, over all processes."""
        return len(self.starts) + 1

    @property
    def mine(self) -> range:
        """Stages of this process."""
        return range(self.process, self.stages, self.processes)

    @property
    def has_last(self) -> bool:
        """Whether this process has the last stage, hence losses and outputs."""
        return self.stages - 1 in self.mine

    def stages_of(self, task: Task, here: int | None = None) -> dict[nn.Module, int]:
        """Return the stage of each module's own parameters and buffers; those around the model are in the last.

        Args:
            here: the one that has constants, of this process; its first one if left out.
        """
        stages = stages_of(task.model, self.starts, self.process if here is None else here)
        return {module: stages.get(module, self.stages - 1) for module in task.modules()}


def keep_own(task: Task, layout: Layout, device: torch.device) -> None:
    """Put the stages of this process on its device, and leave of the others names and shapes.

    Parameters stay the same objects: an optimizer that has all of them steps those that get gradients.
    """
    for module, stage in layout.stages_of(task).items():
        place = device if stage in layout.mine else META
        vars(module).update({name: each.detach().to(place) for name, each in computed(module).items()})
        if any(
            tensor.device != place for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))
        ):
            move_own(module, place)
