"""Samples, steps and bytes of a run, computed from what the run itself would use: what ranks send, and checkpoints."""

import io
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor
from torch.serialization import skip_data

from ddp_recipes._compat.torch_ import tree_map_only
from ddp_recipes.build.recipe import Recipe
from ddp_recipes.build.run import make_optimizer, make_run, make_stop_controller
from ddp_recipes.checkpointing.files import FORMAT
from ddp_recipes.data.order import BatchPlan
from ddp_recipes.strategies import Single
from ddp_recipes.strategies.base import Collective
from ddp_recipes.tasks.fake import new_mode, without_data
from ddp_recipes.tools.dry_run.memory import as_on
from ddp_recipes.tools.dry_run.replica import PipelineStep, Replica
from ddp_recipes.training.state import gather_state


def samples_of(plan: BatchPlan, shard: int | None = None) -> int:
    """Return how many samples of an epoch are in a shard, or in all; batches but the last one are alike."""
    return (plan.num_batches - 1) * plan.size(0, shard) + plan.size(plan.num_batches - 1, shard)


def samples_seen(plan: BatchPlan, steps: int, accumulate: int) -> int:
    """Return how many samples so many optimizer steps take; the last one of an epoch may accumulate fewer batches."""
    epochs, rest = divmod(steps, -(-plan.num_batches // accumulate))
    return epochs * samples_of(plan) + rest * accumulate * plan.global_batch_size


# --- what ranks send -------------------------------------------------------------------------------------------------

KINDS = get_args(Collective.__annotations__["kind"])


def exchange_of(recipe: Recipe, replica: Replica) -> dict[str, Any]:
    """Return what a rank gives to others; where ranks differ, the most that one gives."""
    world, trainer, gbps = recipe.world, recipe.trainer, recipe.request.cluster.interconnect_gbps
    clips = trainer.gradient_clip_val is not None and trainer.gradient_clip_algorithm == "norm"
    times = {"batch": trainer.accumulate_grad_batches, "step": 1, "norm": int(clips)}
    staged = [each for each in replica.steps if isinstance(each, PipelineStep)]
    if staged:
        crossing = {cut: sent for each in staged for cut, sent in each.pipeline.sent.items()}
        passed = [] if replica.failure else [crossing[cut] for cut in sorted(crossing)]
        collectives = of_pipelines([each.reduced for each in staged], passed, world.world_size)
    else:
        (step,) = replica.steps
        collectives = [one for each in step.exchange.sent for one in of_all_ranks(each, world.world_size)]
    given = Counter[tuple[str, int]]()
    for each in collectives:
        given.update(dict.fromkeys(((each.kind, rank) for rank in _givers(each)), times[each.every] * each.bytes))
    most = {kind: max((size for (of, _), size in given.items() if of == kind), default=0) for kind in KINDS}
    at_link = world.local_world_size if world.nnodes > 1 else 1  # what is within a node takes no time
    bits = 8 * leaving(collectives, times, at_link)
    return {
        **{f"{kind}_bytes": size for kind, size in most.items()},
        **({"passed_bytes": None} if staged and replica.failure else {}),
        "sent_bytes_a_rank": round(leaving(collectives, times, 1)),
        "at_least_seconds": None if gbps is None else bits / (gbps * 1e9),
    }


def of_all_ranks(collective: Collective, world_size: int) -> Iterator[Collective]:
    """Yield it once for each group of ranks, given the one that rank 0 is in: every rank is in one."""
    step, length = collective.ranks.step, len(collective.ranks) * collective.ranks.step
    for block in range(0, world_size, length):
        for first in range(block, block + step):
            yield replace(collective, ranks=range(first, first + length, step))


def of_pipelines(reduced: Sequence[int], passed: Sequence[tuple[int, int]], world_size: int) -> list[Collective]:
    """Return what is sent in a step of pipelines: gradients are added up once, activations are passed in each batch.

    Args:
        reduced: bytes that each process of a replica gives to all-reduces.
        passed: bytes that cross each cut of a replica, forward and backward.
    """
    n = len(reduced)
    found = [Collective("all_reduced", size, range(process, world_size, n)) for process, size in enumerate(reduced)]
    for first in range(0, world_size, n):
        for cut, (forward, backward) in enumerate(passed, start=1):
            before, after = first + (cut - 1) % n, first + cut % n
            found.append(Collective("passed", forward, range(before, 2 * after - before, after - before), "batch"))
            found.append(Collective("passed", backward, range(after, 2 * before - after, before - after), "batch"))
    return found


def leaving(collectives: Sequence[Collective], times: Mapping[str, int], at_link: int) -> float:
    """Return the bytes that leave a link at least in an optimizer step: the link that most leave.

    An all-reduce of S bytes among n takes 2 (n - 1) / n S from each (Patarasuk and Yuan, "Bandwidth optimal all-reduce
    algorithms for clusters of workstations", 2009); a reduce-scatter or an all-to-all of S bytes (n - 1) / n S; an
    all-gather of S bytes each (n - 1) S. The buffers that rank 0 broadcasts are left out. Ranks that share a link add
    up what they all-reduce before it leaves.

    Args:
        at_link: ranks that share a link: 1, or those of a node.
    """
    found: defaultdict[int, float] = defaultdict(float)
    for each in collectives:
        n = len({rank // at_link for rank in each.ranks})
        factor = {"all_reduced": 2 * (n - 1) / n, "gathered": n - 1, "passed": n - 1, "broadcast": 0}
        size = times[each.every] * each.bytes * factor.get(each.kind, (n - 1) / n)
        for link, ranks in Counter(rank // at_link for rank in _givers(each)).items():
            found[link] += size * (1 if each.kind == "all_reduced" else ranks)
    return max(found.values(), default=0)


def _givers(collective: Collective) -> range:
    """Return the ranks that give what it says: of what is passed the first one of two."""
    return collective.ranks[:1] if collective.kind == "passed" else collective.ranks


# --- what is saved ---------------------------------------------------------------------------------------------------


def checkpoint_bytes(recipe: Recipe, replica: Replica) -> int | None:
    """Return the size of a checkpoint: it is written to where only the bytes are counted, with no data in it.

    Not that of an optimizer whose step could not be run without data either.
    """
    try:
        stepped = state_of(recipe, replica)  # before the task is a run's, which cannot be copied
    except Exception:  # the same failed in the step, which a finding says
        if replica.failure is None:
            raise
        return None
    run = make_run(recipe, make_stop_controller(recipe), Single())  # there is nobody to gather from
    names, steps = [], recipe.length.total_steps
    if steps != 0:
        names = [f"train/{name}" for name in ("loss", "lr", "samples_per_second", "epoch", "grad_norm")]
    names += [f"{split}/{name}" for split in run.val for name in ("loss", *recipe.task.metrics)]
    gathered = gather_state(run)
    weights = {id(value): stepped["model"].get(name, value) for name, value in gathered["model"].items()}
    state = tree_map_only(
        Tensor, lambda each: weights.get(id(each), each), gathered
    ) | {  # Lightning's names them again
        **stepped,
        "metrics": dict.fromkeys(names, 0.0),
        "world_size": recipe.world.world_size,
        "checkpointer": {"values": {"1": 0.0}},
    }
    sink = _Counted()
    with new_mode(), skip_data(materialize_fake_tensors=True):
        torch.save({"format": FORMAT, **state}, sink)  # type: ignore[arg-type]
    return sink.size


def state_of(recipe: Recipe, replica: Replica) -> dict[str, Any]:
    """Return what a checkpoint has of model and optimizer, which have stepped, without data."""
    device, mode = replica.steps[0].devices[0], new_mode()
    task = without_data(recipe.task, {}, [device], mode)
    with mode:
        optimizer = make_optimizer(recipe.job.config, task, may_fuse=recipe.may_fuse)
        as_on(optimizer, device.type)
        for name, each in task.named_parameters():
            if each.requires_grad and name.removeprefix("model.") not in replica.unused:
                each.grad = torch.empty_like(each)
        optimizer.step()
    return {"model": task.weights(), "optimizer": optimizer.state_dict()}


class _Counted(io.RawIOBase):
    """A file that keeps nothing but its size."""

    def __init__(self) -> None:
        self.size = 0

    def write(self, data: Any) -> int:
        written = memoryview(data).nbytes
        self.size += written
        return written

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Skip what has no data."""
        self.size = offset + (self.size if whence == os.SEEK_CUR else 0)
        return self.size
