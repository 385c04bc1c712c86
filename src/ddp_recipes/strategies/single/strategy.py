"""One process, no wrapper."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import torch
from torch import Tensor

from ddp_recipes.config.parallelism import StrategySettings
from ddp_recipes.runtime.messages import Messages
from ddp_recipes.runtime.world import World
from ddp_recipes.strategies.base import Exchange, Whole, Wrapped
from ddp_recipes.strategies.single.settings import SingleSettings
from ddp_recipes.tasks import Task


class Single(Whole):
    """One process, no wrapper: the reference that every other strategy must agree with."""

    Settings: type[StrategySettings] = SingleSettings
    divisor = 1

    def __init__(self, settings: StrategySettings | None = None) -> None:
        self.settings = settings or SingleSettings()

    def setup(
        self, world: World, messages: Messages | None, backend: str, timeout: timedelta, init_method: str | None
    ) -> None:
        """Do nothing: there are no other ranks to join."""

    def wrap(self, task: Task, devices: Sequence[torch.device]) -> Wrapped:
        return cast(Wrapped, task)

    def reduce(self) -> None:
        """Gradients are complete."""

    def sum(self, values: Tensor) -> Tensor:
        return values.sum(dim=0)

    def gather(self, value: Any) -> list[Any] | None:
        return [value]

    def sync_buffers(self, task: Task) -> None:
        """Do nothing: there is one model."""

    def exchange(self, task: Task, world: World) -> Exchange:
        """Return an empty exchange: nothing is sent."""
        return Exchange()

    def teardown(self) -> None:
        """Do nothing: nothing was set up."""
