"""A reduce-scatter that adds what ranks send in the order of the shards, to what came of the shards before."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_recipes._compat.collectives import all_gather_single


class OrderedReduceScatter:
    """The running total of this rank's part of a block's gradients, over the shards of a step.

    Has the methods that ``FSDPModule.set_custom_reduce_scatter`` asks for; their base class has no public name.
    Ranks take turns, so what they send at one time are shards that follow each other. -0.0 added to any number leaves
    it as it is: that is what a shard without a sample counts.

    Args:
        replicas: the ranks that have the same part in other replicas; ``None`` where there is one.
    """

    def __init__(self, replicas: dist.ProcessGroup | None) -> None:
        self.replicas = replicas
        self.total: Tensor | None = None
        self.counts = True  # whether this rank's shard has a sample

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for what is sent or received."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Send each rank its part of ``input_tensor``; leave the total in ``output_tensor``."""
        if not self.counts:
            input_tensor.fill_(-0.0)
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        if self.replicas is not None:
            of_all = received.new_empty(self.replicas.size() * len(received))
            all_gather_single(of_all, received, group=self.replicas)
            received = of_all
        first, *rows = received.view(-1, len(output_tensor))
        if self.total is None:
            output_tensor.copy_(first)
        else:
            torch.add(self.total, first, out=output_tensor)
        for row in rows:
            output_tensor.add_(row)
        self.total = output_tensor
