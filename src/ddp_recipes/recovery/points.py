"""Each point once, also where a step is done again because a rank was lost."""

from __future__ import annotations

from collections.abc import Mapping

from ddp_recipes.loggers.base import Logger, Loggers


class Points(Loggers):
    """Give points to a logger, each once and at once; every rank keeps those of the latest step for a new rank 0.

    A kill takes with it what waits in memory, so nothing does.

    Args:
        logger: rank 0's; another rank's drops them.
    """

    def __init__(self, logger: Logger) -> None:
        super().__init__([logger])
        self._step = -1
        self._values: dict[str, float] = {}
        self._batches: dict[str, int] = {}  # the last one of an evaluation, by name

    @property
    def latest(self) -> tuple[int, dict[str, float]]:
        """The latest step that had points, and those."""
        return self._step, self._values

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        if step > self._step:
            self._step, self._values = step, {}
        if step < self._step:
            return
        fresh = {name: value for name, value in values.items() if name not in self._values}
        self._values |= fresh
        if fresh:
            super().scalars(fresh, step)
            self.flush()

    def of_batch(self, values: Mapping[str, float], batch: int, step: int) -> None:
        fresh = {name: value for name, value in values.items() if batch > self._batches.get(name, -1)}
        if fresh:
            self._batches |= dict.fromkeys(fresh, batch)
            super().of_batch(fresh, batch, step)
            self.flush()
