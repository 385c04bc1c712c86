"""Collectives in a user's step, refused by name where ranks would wait for each other, or send what others do not take.

torch's own ways out are a hang, and an end by SIGABRT.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from torch import Tensor

from ddp_recipes._compat.torch_ import OnCollective
from ddp_recipes.data.loader import Batch, Loader
from ddp_recipes.errors import RequestError, RunFailed
from ddp_recipes.strategies import Strategy
from ddp_recipes.training.state import Run

_FIRST = 3  # batches of which it is looked at where all are uneven
_OF_A_PIPELINE = ("send", "recv", "broadcast")  # its own
_OF_FSDP = "_base_"  # as are these
_OF_ROWS = ("gather", "scatter", "alltoall", "all_to_all")


def refusing_collectives(run: Run) -> Callable[[], AbstractContextManager[object]]:
    """Return contexts that refuse collectives in validation steps, where not all ranks would take part.

    In them is raised a ``RequestError``; ``RunFailed`` where not all ranks come to it.
    """
    settings = run.strategy.settings
    if run.world.world_size == 1 or settings.kind == "sharded":
        return nullcontext
    if (reason := _reason_against_all(run)) is not None:

        def refuse_all(called: str, _: Sequence[Tensor]) -> None:
            if settings.processes_per_replica == 1 or not any(part in called for part in _OF_A_PIPELINE):
                everywhere = settings.fixed_shards is not None and settings.processes_per_replica == 1
                raise (RequestError if everywhere else RunFailed)(
                    f"The model or its step calls {called}, in which all ranks have to take part, and "
                    f"strategy={settings.name} {reason}. Choose another strategy, or leave the collective out."
                )

        return partial(OnCollective, refuse_all)
    uneven = [name for name, loader in run.val.items() if not loader.is_even]
    if not uneven:
        return nullcontext

    def refuse(called: str, _: Sequence[Tensor]) -> None:
        raise refused_collective(called, uneven[0], run.val[uneven[0]])

    return partial(OnCollective, refuse)


def _reason_against_all(run: Run) -> str | None:
    """Return why no collective in a step can be right with this strategy, if that is so."""
    settings, world_size = run.strategy.settings, run.world.world_size
    if settings.processes_per_replica > 1:
        return "has each of them run another part of the model"
    if settings.fixed_shards is not None:
        return "promises the same bits on any number of ranks"
    if (readers := settings.batch_shards(run.world).readers) < world_size:
        return f"runs the model on {readers} of {world_size} ranks"
    return None


def refused_collective(called: str, name: str, loader: Loader) -> RequestError:
    """Return the refusal of a collective in a step, where ranks have different numbers of batches."""
    return RequestError(
        f"A validation step calls {called}, and with {loader.in_words} ({name}) some ranks may have one batch more "
        f"than others, for which they would wait. Leave it to the end of the evaluation (on_validation_epoch_end, a "
        f"metric of torchmetrics), or choose data.val_batch_size so that the last batch has a sample for each rank."
    )


def of_rows(strategy: Strategy, loader: Loader, name: str, batch: Batch) -> AbstractContextManager[object]:
    """Return a context that refuses to gather a batch's rows, where other ranks have other numbers of them.

    In it is raised ``RunFailed``.
    """
    plan, settings = loader.plan, strategy.settings
    if plan.same_sizes or settings.fixed_shards is not None:
        return nullcontext()
    sizes = [plan.size(batch.number, shard) for shard in (0, plan.num_shards - 1)]
    most, least = max(sizes), min(sizes)
    if most == least or _FIRST <= batch.number < plan.num_batches - 1:
        return nullcontext()

    def refuse(called: str, tensors: Sequence[Tensor]) -> None:
        if strategy.settings.kind == "sharded" and _OF_FSDP in called:
            return
        if any(part in called for part in _OF_ROWS) and any(each.shape[:1] == (batch.num_samples,) for each in tensors):
            split = name.partition("/")[0]
            whole = "" if split == "train" else "val_"
            raise RunFailed(
                f"A step calls {called} with the {batch.num_samples} rows of a batch, and of batch {batch.number} of "
                f"{name} some ranks have {most} samples and others {least}. Choose data.{whole}batch_size so "
                f"that {plan.num_shards} ranks divide every batch of {plan.num_samples} samples, or pad what is "
                f"gathered{', or set data.drop_last=true' if split == 'train' else ''}."
            )

    return OnCollective(refuse)
