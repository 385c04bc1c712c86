"""How many floating-point operations a model takes, by torch's counter, on tensors without data."""

from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ddp_recipes.devices import HOST
from ddp_recipes.model_parallel.fake import fake_batch, new_mode, without_data
from ddp_recipes.tasks import Task


def count_flops(task: Task, sample: Any, size: int) -> int:
    """Return the operations of the forward and the backward pass of a training step, on a copy of the task.

    They are the model's: what is computed again for want of memory is not counted, and attention as if nothing in it
    was masked.

    Args:
        sample: a batch of one, of which the copy gets ``size``.

    Raises:
        Exception: of any kind, where the step needs values.
    """
    from torch.utils.flop_counter import FlopCounterMode  # with it comes Triton, which takes its time

    mode, host = new_mode(), torch.device(HOST)
    copied = without_data(task, (), [host], mode)
    with mode, torch.enable_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        copied.training_step(fake_batch(sample, size, host)).loss.backward()  # type: ignore[no-untyped-call]
    return int(counter.get_total_flops())
