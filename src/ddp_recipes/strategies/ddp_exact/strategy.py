"""The same bits on any number of processes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import cast

import torch
from torch import Tensor, nn

from ddp_recipes.errors import RequestError
from ddp_recipes.runtime.messages import Messages
from ddp_recipes.runtime.phases import ALL_REDUCE, phase
from ddp_recipes.runtime.world import World
from ddp_recipes.strategies.base import Exchange, Whole, Wrapped
from ddp_recipes.strategies.ddp_exact.ordered_sum import OrderedSum, sum_in_turns
from ddp_recipes.strategies.ddp_exact.settings import DDPExactSettings
from ddp_recipes.strategies.group import Group
from ddp_recipes.tasks import Task
from ddp_recipes.tasks.written import buffers_kept


class DDPExact(Whole, Group):
    """Cuts each global batch into the same shards on any number of ranks, and adds what they give in one order.

    What comes out depends on ``shards`` but not on the world size. It does depend on the build of torch, on the kind of
    processor and on the number of threads, which therefore is set; on a GPU it takes ``trainer.deterministic`` as well.
    """

    Settings = DDPExactSettings
    settings: DDPExactSettings
    divisor = 1

    def __init__(self, settings: DDPExactSettings | None = None) -> None:
        self.settings = settings or DDPExactSettings()
        self.total: OrderedSum | None = None

    def check(self, task: Task, devices: Sequence[torch.device]) -> None:
        """Refuse layers whose gradients are sparse, besides what the base refuses."""
        super().check(task, devices)
        for name, module in task.named_modules():
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
                raise RequestError(
                    f"strategy=ddp_exact adds dense gradients, but those of {name} are sparse. Make it with "
                    f"sparse=False, or use strategy=ddp."
                )

    def setup(
        self, world: World, messages: Messages | None, backend: str, timeout: timedelta, init_method: str | None
    ) -> None:
        """Join the process group, and set the number of threads: sums within an operation depend on it."""
        if self.settings.num_threads is not None:
            torch.set_num_threads(self.settings.num_threads)
        super().setup(world, messages, backend, timeout, init_method)

    def wrap(self, task: Task, devices: Sequence[torch.device]) -> Wrapped:
        """Return the task itself: its gradients are taken after backward."""
        self.total = OrderedSum(task, self.world, self.settings.batch_shards(self.world).count)
        return cast(Wrapped, task)

    @contextmanager
    def batch_shard(self, weight: float) -> Iterator[None]:
        """Compute a shard from the buffers that the step started from, and take what it leaves."""
        assert self.total is not None
        with phase(ALL_REDUCE):
            self.total.begin()
        yield
        with phase(ALL_REDUCE):
            self.total.take(weight)

    @contextmanager
    def evaluation(self, task: Task) -> Iterator[None]:
        """Leave weights and buffers as they are."""
        with buffers_kept(task) as moved, nullcontext() if self.total is None else self.total.watch.one():
            yield
        self.moved |= moved

    def reduce(self) -> None:
        """Put the ordered sum in place."""
        assert self.total is not None
        self.total.reduce()

    def sum(self, values: Tensor) -> Tensor:
        """Gather the rows of all ranks and add them in the order of the shards."""
        return sum_in_turns(self, values)

    def exchange(self, task: Task, world: World) -> Exchange:
        """Return the rows of this rank's shards and their sum; a row is sent for each, then its own slice."""
        return OrderedSum(task, world, self.settings.batch_shards(world).count).exchange()

    def teardown(self) -> None:
        """Drop what is being sent as well, which keeps connections open."""
        self.total = None
        super().teardown()

    def sync_buffers(self, task: Task) -> None:
        """Do nothing: buffers are the same on every rank after each step."""
