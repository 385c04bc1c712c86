"""torch.nn.DataParallel: one process, several GPUs."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn

from ddp_recipes.devices import GPU, HOST, all_of, is_accelerator
from ddp_recipes.errors import RequestError
from ddp_recipes.strategies.base import Wrapped
from ddp_recipes.strategies.dp.settings import DataParallelSettings
from ddp_recipes.strategies.single.strategy import Single
from ddp_recipes.tasks import StepOutput, Task


class DataParallel(Single):
    """Splits each batch over all visible GPUs of one process; on CPU it is a plain module, as in torch.

    It is here for recipes that have it. ``ddp`` is faster: its replicas share no interpreter lock and nothing is copied
    from the first GPU to the others at each step.
    """

    Settings = DataParallelSettings

    def replicas(self, device_type: str) -> int:
        """Every visible GPU, or one on CPU."""
        return 1 if device_type == HOST else max(1, torch.accelerator.device_count())

    def draws_on(self, devices: Sequence[torch.device]) -> Sequence[torch.device]:
        """Return all visible GPUs, each of which has a copy of the model and a thread."""
        return devices if not is_accelerator(devices[0]) else all_of(devices[0].type)

    def check(self, task: Task, devices: Sequence[torch.device]) -> None:
        """Refuse a replica that spans devices, and devices between which torch cannot deal a batch."""
        if devices[0].type not in (HOST, GPU):
            raise RequestError(
                f"strategy=dp is torch's DataParallel, which deals batches to GPUs alone, and this run is on "
                f"{devices[0].type}. Use strategy=ddp, or strategy=single."
            )
        own_step = type(task).training_step is not Task.training_step
        if is_accelerator(devices[0]) and own_step:
            raise RequestError(
                f"strategy=dp copies the model alone to every GPU and gives it inputs, so {type(task).__name__}'s own "
                f"training_step would not be called. Use strategy=ddp, or strategy=single."
            )
        if len(devices) > 1:
            raise RequestError(
                f"strategy=dp copies the model to every GPU, so a replica cannot span {len(devices)} devices "
                f"(model.num_devices={len(devices)}). Use strategy=ddp, or strategy=single."
            )

    def wrap(self, task: Task, devices: Sequence[torch.device]) -> Wrapped:
        """Put the model, not the task, into ``DataParallel``: the loss is then the mean over the whole batch."""
        if not is_accelerator(devices[0]):
            return cast(Wrapped, task)
        parallel = nn.DataParallel(task.model)

        def training_step(batch: Any) -> StepOutput:
            inputs, targets = batch
            return task.training_output(parallel(inputs), targets)

        return training_step
