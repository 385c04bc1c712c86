"""When a learning-rate scheduler advances, and on what."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ddp_recipes.errors import RequestError


@dataclass
class Schedule:
    """A scheduler and its cadence.

    Attributes:
        interval: what one tick is: ``step`` or ``epoch``.
        frequency: it advances at each so many ticks, counted within an epoch where a tick is a step.
        monitor: the metric that it follows, once measured; ``None`` for one that follows from the number of ticks.
        strict: whether a metric that is not there ends the run; else it does not advance.
        advance: does so, given the scheduler and the metric.
        name: what its learning rate is called, where that is given.
    """

    scheduler: Any
    interval: str
    frequency: int = 1
    monitor: str | None = None
    strict: bool = True
    advance: Callable[[Any, float | None], None] | None = None
    name: str | None = None

    def tick(self, batch: int, epoch: int | None, metrics: Mapping[str, float] | None = None) -> None:
        """Advance after an optimizer step, if it is time.

        Args:
            batch: batches of the epoch that are done.
            epoch: epochs that are done, if this step ended one.
            metrics: the latest ones, for schedulers that follow one; ``None`` for all others.
        """
        number = batch if self.interval == "step" else epoch
        if number is None or (metrics is None) != (self.monitor is None) or number % self.frequency:
            return
        value = None
        if metrics is not None and self.monitor is not None and (value := metrics.get(self.monitor)) is None:
            if not self.strict:
                return
            raise RequestError(
                f"{type(self.scheduler).__name__} follows {self.monitor}, which is not measured. Measured are: "
                f"{', '.join(sorted(metrics))}."
            )
        if self.advance is not None:
            self.advance(self.scheduler, value)
        elif value is None:
            self.scheduler.step()
        else:
            self.scheduler.step(value)


class OwnOptimizers(NamedTuple):
    """Optimizers and schedules that a task brings itself; without a schedule the config's goes with the first one."""

    optimizers: Sequence[torch.optim.Optimizer]
    schedules: Sequence[Schedule]
