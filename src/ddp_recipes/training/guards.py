"""What ends a run that cannot go on: non-finite losses and weights, and collectives in which not all ranks take part.

Of the former all ranks end at one step, before anything of it is saved. Of the latter, in a user's step, torch's own
ways out are a hang, and an end by SIGABRT.
"""

from __future__ import annotations

import cmath
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from traceback import walk_stack
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor, nn

from ddp_recipes._compat.torch_ import OnCollective, local
from ddp_recipes.config.parallelism import StrategySettings
from ddp_recipes.data.loader import Batch, Loader
from ddp_recipes.errors import RecipeError, RequestError, RunFailed
from ddp_recipes.runtime.world import World
from ddp_recipes.strategies import Strategy
from ddp_recipes.strategies.base import by_rank

if TYPE_CHECKING:
    from ddp_recipes.training.state import Run

Losses = list[tuple[Tensor, float]]  # of a shard's micro-batches: the mean, on the device, and samples it counts for


class NonFiniteGuard:
    """Checks where it costs nothing: the loss that is logged, summed over ranks anyway, and weights before a save.

    A step that 16-mixed skips because gradients overflowed is not found: neither loss nor weights show it.

    Args:
        total: sums rows over ranks, [rows, ...] to [...]; a collective.
    """

    def __init__(self, world: World, total: Callable[[Tensor], Tensor], device: torch.device) -> None:
        self.world = world
        self.total = total
        self.device = device
        self._losses: deque[tuple[int, Sequence[Losses]]] = deque(maxlen=1000)  # of this rank, unread
        self._unset: set[str] = set()  # buffers that are NaN until they are measured

    def begin(self, task: nn.Module) -> None:
        """Take buffers that are NaN before training for numbers that are to be measured yet."""
        buffers = {name.removeprefix("model."): local(each) for name, each in task.named_buffers()}
        unset = _numbers({name: each.isnan().any() for name, each in buffers.items() if _may_be_non_finite(each)})
        self._unset = {name for name, bad in unset.items() if bad}

    def bad_weights(self, task: nn.Module) -> dict[str, bool]:
        """Return for each of the weights whether it is non-finite and should not be."""
        return {name: bad and name not in self._unset for name, bad in non_finite_weights(task).items()}

    def record(self, step: int, losses: Sequence[Losses]) -> None:
        """Keep a step's losses on this rank, to name the first non-finite one."""
        if losses:
            self._losses.append((step, losses))

    def check_loss(self, step: int, loss: float, saved: int) -> None:
        """End the run if the loss over all ranks is non-finite.

        Args:
            saved: the step of the last checkpoint, or -1.

        Raises:
            RunFailed: names the step, and the ranks and the step where it began.
        """
        if math.isfinite(loss):
            self._losses.clear()
        else:
            self._end(f"At step {step} the loss is {loss}", saved, [1] * self.world.world_size)

    def fail_for_weights(self, step: int, bad: Mapping[str, bool], saved: int) -> NoReturn:
        """End the run because some rank has non-finite weights.

        Args:
            bad: what :meth:`bad_weights` returns for this rank's.

        Raises:
            RunFailed: names some of the weights, and the ranks and the step where it began.
        """
        counts = self.total(torch.tensor([list(map(int, bad.values()))], device=self.device)).tolist()
        names = [name for name, count in zip(bad, counts, strict=True) if count]
        listed = f"{', '.join(names[:3])}{', …' if len(names) > 3 else ''}"
        by_rank = self._of_ranks(sum(bad.values()))
        self._end(f"After step {step} the model's weights ({listed}) are non-finite", saved, by_rank)

    def _end(self, what: str, saved: int, by_rank: list[int]) -> NoReturn:
        """Find the first non-finite loss of any rank, and raise the same on all ranks."""
        mine = next((at for at, losses in self._losses if not all(map(_is_finite, losses))), 0)
        first = self._of_ranks(mine)
        began = min((step for step in first if step), default=0)
        ranks = [rank for rank, step in enumerate(first) if step == began] if began else []
        culprits = ranks or [rank for rank, bad in enumerate(by_rank) if bad]
        where = f" on rank {', '.join(map(str, culprits))}" if self.world.world_size > 1 else ""
        since = f"; the first non-finite loss was{where} at step {began}" if began else where
        kept = f"the last checkpoint, of step {saved}, is good" if saved > 0 else "there is no earlier one"
        raise RunFailed(
            f"{what}{since}. Nothing of it was saved; {kept}. Try a lower optimizer.lr or trainer.gradient_clip_val; "
            f"trainer.detect_anomaly=true finds the operation.",
            rank=culprits[0],
        )

    def _of_ranks(self, value: int) -> list[int]:
        found: list[int] = by_rank(torch.tensor(value, device=self.device), self.world, self.total).tolist()
        return found


def _is_finite(shard: Losses) -> bool:
    return all(loss.isfinite() for loss, count in shard if count)


def non_finite_weights(task: nn.Module) -> dict[str, bool]:
    """Return for each of the weights whether it is non-finite.

    A parameter must be finite. A buffer must not be NaN; attention masks are made of infinities. What has no data is
    held by another rank.
    """
    parameters = dict(task.named_parameters())
    tensors = {name: local(each) for name, each in [*parameters.items(), *task.named_buffers()]}
    # A sum is finite only if all of its terms are, and takes a tenth of the time of a look at each.
    sums = _numbers({name: _sum(tensor) for name, tensor in tensors.items() if _may_be_non_finite(tensor)})
    suspects = [name for name, total in sums.items() if not cmath.isfinite(total)]
    bad = _numbers({name: _is_non_finite(tensors[name], name in parameters) for name in suspects})
    return {name.removeprefix("model."): bool(bad.get(name, False)) for name in tensors}


def _may_be_non_finite(tensor: Tensor) -> bool:
    return not tensor.is_meta and (tensor.is_floating_point() or tensor.is_complex()) and tensor.itemsize > 1


def _is_non_finite(tensor: Tensor, is_parameter: bool) -> Tensor:
    return ~tensor.isfinite().all() if is_parameter else tensor.isnan().any()


def _sum(tensor: Tensor) -> Tensor:
    return tensor.sum(dtype=torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else None)


def _numbers(values: Mapping[str, Tensor]) -> dict[str, complex]:
    """Return single values on any devices as Python's numbers, with one wait for those of a kind on a device."""
    kinds: dict[tuple[torch.dtype, torch.device], list[str]] = {}
    for name, value in values.items():
        kinds.setdefault((value.dtype, value.device), []).append(name)
    return {
        name: number
        for names in kinds.values()
        for name, number in zip(names, torch.stack([values[name] for name in names]).tolist(), strict=True)
    }


_FIRST = 3  # batches of which it is looked at where all are uneven, or none may be gathered
_OF_ROWS = ("gather", "scatter", "alltoall", "all_to_all")
_OURS = ("ddp_recipes.", "torch.distributed.fsdp.")  # whose collectives are a strategy's own
_OF_A_PIPELINE = ("send", "recv", "broadcast")  # its own, whoever wraps them, too


def refusing_collectives(run: Run) -> Callable[[], AbstractContextManager[object]]:
    """Return contexts that refuse collectives in validation steps, where not all ranks would take part.

    In them is raised a ``RequestError``; ``RunFailed`` where not all ranks come to it.
    """
    settings = run.strategy.settings
    if run.world.world_size == 1 or settings.kind == "sharded":
        return nullcontext
    if (reason := reason_against_all(settings, run.world)) is not None:
        return partial(_refusing_all, settings, reason)
    uneven = [name for name, loader in run.val.items() if not loader.is_even]
    if not uneven:
        return nullcontext

    def refuse(called: str, _: Sequence[Tensor]) -> None:
        raise refused_collective(called, uneven[0], run.val[uneven[0]])

    return partial(OnCollective, refuse)


def reason_against_all(settings: StrategySettings, world: World) -> str | None:
    """Return why no collective in a step can be right with this strategy, if that is so."""
    if settings.processes_per_replica > 1:
        return "has each of them run another part of the model"
    if settings.fixed_shards is not None:
        return "promises the same bits on any number of ranks"
    if (readers := settings.batch_shards(world).readers) < world.world_size:
        return f"runs the model on {readers} of {world.world_size} ranks"
    return None


def _refusing_all(settings: StrategySettings, reason: str) -> AbstractContextManager[object]:
    own = _OF_A_PIPELINE if settings.processes_per_replica > 1 else ()

    def refuse(called: str, _: Sequence[Tensor]) -> None:
        if not (any(part in called for part in own) or _is_ours()):
            raise against_all(called, settings, reason)

    return OnCollective(refuse)


def against_all(called: str, settings: StrategySettings, reason: str) -> RecipeError:
    """Return the refusal of any collective in a step, for a reason: of a request, if all ranks come to it."""
    everywhere = settings.fixed_shards is not None and settings.processes_per_replica == 1
    return (RequestError if everywhere else RunFailed)(
        f"The model or its step calls {called}, in which all ranks have to take part, and strategy={settings.name} "
        f"{reason}. Choose another strategy, or leave the collective out."
    )


def _is_ours() -> bool:
    """Whether the collective that is about to run is called by a strategy, or by FSDP, and not by a user's code."""
    names = (str(frame.f_globals.get("__name__")) for frame, _ in walk_stack(None))
    before = next(each for each in names if each not in (__name__, OnCollective.__module__) and not _in_torch(each))
    return before.startswith(_OURS)


def _in_torch(name: str) -> bool:
    return name.partition(".")[0] == "torch" and not name.startswith(_OURS)


def refused_collective(called: str, name: str, loader: Loader) -> RequestError:
    """Return the refusal of a collective in a step, where ranks have different numbers of batches."""
    return RequestError(
        f"A validation step calls {called}, and with {loader.in_words} ({name}) some ranks may have one batch more "
        f"than others, for which they would wait. Leave it to the end of the evaluation (on_validation_epoch_end, a "
        f"metric of torchmetrics), or choose data.val_batch_size so that the last batch has a sample for each rank."
    )


def of_rows(strategy: Strategy, loader: Loader, name: str, batch: Batch) -> AbstractContextManager[object]:
    """Return a context that refuses to gather a batch's rows, where other ranks have other numbers of them.

    In it is raised ``RunFailed``. Of strategies with which no collective can be right, any is refused.
    """
    plan, settings = loader.plan, strategy.settings
    looked_at = batch.number < _FIRST and strategy.world.world_size > 1
    if looked_at and (reason := reason_against_all(settings, strategy.world)) is not None:
        return _refusing_all(settings, reason)
    if plan.same_sizes or settings.fixed_shards is not None:
        return nullcontext()
    sizes = [plan.size(batch.number, shard) for shard in (0, plan.num_shards - 1)]
    most, least = max(sizes), min(sizes)
    if most == least or _FIRST <= batch.number < plan.num_batches - 1:
        return nullcontext()

    def refuse(called: str, tensors: Sequence[Tensor]) -> None:
        rows = any(part in called for part in _OF_ROWS) and any(
            each.shape[:1] == (batch.num_samples,) for each in tensors
        )
        if rows and not _is_ours():
            split = name.partition("/")[0]
            whole = "" if split == "train" else "val_"
            raise RunFailed(
                f"A step calls {called} with the {batch.num_samples} rows of a batch, and of batch {batch.number} of "
                f"{name} some ranks have {most} samples and others {least}. Choose data.{whole}batch_size so "
                f"that {plan.num_shards} ranks divide every batch of {plan.num_samples} samples, or pad what is "
                f"gathered{', or set data.drop_last=true' if split == 'train' else ''}."
            )

    return OnCollective(refuse)
