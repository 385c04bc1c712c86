"""How many batches an optimizer step takes, by epoch."""

from collections.abc import Mapping
from dataclasses import replace

from ddp_recipes.callbacks.base import Callback
from ddp_recipes.errors import RequestError

__all__ = ["GradientAccumulation"]


class GradientAccumulation(Callback):
    """Accumulate so many batches in each optimizer step from an epoch on; before the first, as ``trainer`` says.

    Args:
        schedule: the first epoch, counted from 0, to ``trainer.accumulate_grad_batches``.

    Raises:
        RequestError: it is no such schedule.
    """

    def __init__(self, schedule: Mapping[int, int]) -> None:
        given = dict(schedule) if isinstance(schedule, Mapping) else {}
        # On its way to other processes a number that is a key becomes text.
        pairs = {int(epoch): count for epoch, count in given.items() if str(epoch).isdigit() and type(count) is int}
        if not pairs or len(pairs) < len(given) or min(pairs.values()) < 1:
            raise RequestError(
                f"callbacks.gradient_accumulation.schedule={schedule} is not allowed. Allowed: epochs, counted from 0, "
                f"to numbers of batches, as in '{{4: 2, 8: 4}}'."
            )
        self.accumulation = pairs

    def on_epoch_start(self, epoch: int) -> None:
        if begun := [first for first in self.accumulation if first <= epoch]:
            batches = self.accumulation[max(begun)]
            self.run.trainer = replace(self.run.trainer, accumulate_grad_batches=batches)
