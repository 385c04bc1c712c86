"""A reduce-scatter that adds what ranks send in the order of the shards, to what came of the shards before."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_recipes.errors import RunFailed
from ddp_recipes.strategies.ddp_exact.ordered_sum import all_gather_single
from ddp_recipes.strategies.exchanges import exchanged
from ddp_recipes.strategies.fsdp.order import Order, ReduceScatter


class OrderedReduceScatter(ReduceScatter):
    """The running total of this rank's part of a block's gradients, over the shards of a step.

    It is called once a shard, for FSDP2 adds what each call leaves. Ranks take turns, so what they send at one time are
    shards that follow each other. -0.0 added to any number leaves it as it is: that is what a shard without a sample
    counts.
    """

    def __init__(self, order: Order, block: int) -> None:
        super().__init__(order, block)
        self.total: Tensor | None = None
        self.counts = True  # whether this rank's shard has a sample
        self.done = False  # whether it has been reduced

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Send each rank its part of ``input_tensor``; leave the total in ``output_tensor``."""
        self.begin(input_tensor)
        if self.done:
            raise RunFailed(
                f"Gradients of {self.block} were reduced twice in a pass, as where a gradient is taken within the "
                f"forward pass (torch.autograd.grad) at what a block returned. Choose strategy.wrap so that what "
                f"returns it is in no block, or strategy=ddp_exact."
            )
        self.done = True
        if not self.counts:
            input_tensor.fill_(-0.0)
        received = torch.empty_like(input_tensor)
        exchanged(dist.all_to_all_single, received, input_tensor, group=group)
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
