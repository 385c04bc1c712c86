"""Operations counted in the first step of a run, where a copy of the model without data cannot tell them."""

from collections.abc import Callable, Iterator

from torch.utils.flop_counter import FlopCounterMode

from ddp_recipes.data.loader import Batch
from ddp_recipes.training.clock import Flops
from ddp_recipes.training.state import Run, Update


def counted(
    step: Callable[[Run, Iterator[Batch], bool], Update], flops: Callable[[float], Flops]
) -> Callable[..., Update]:
    """Return a step that counts what this process computes in it, for the samples that it has; the others do not.

    Args:
        step: the run's.
        flops: returns what the run logs of the operations of a sample.
    """

    def first(run: Run, batches: Iterator[Batch], measured: bool) -> Update:
        with FlopCounterMode(display=False) as counter:
            update = step(run, batches, measured)
        plan, batch = run.train.plan, run.cursor.batch
        numbers = range(batch, min(batch + run.trainer.accumulate_grad_batches, len(run.train)))
        if samples := sum(plan.size(number, shard) for number in numbers for shard in run.train.shards):
            run.update, run.flops = step, flops(counter.get_total_flops() / samples)
        return update

    return first
