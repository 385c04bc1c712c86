"""Samples, steps and bytes of a run, computed from what the run itself would use: what ranks send, and checkpoints."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import torch
from torch.serialization import skip_data

from ddp_recipes.build.recipe import Recipe
from ddp_recipes.build.run import make_run, make_stop_controller
from ddp_recipes.checkpointing.files import FORMAT
from ddp_recipes.data.order import BatchPlan
from ddp_recipes.runtime.world import World
from ddp_recipes.strategies import Single
from ddp_recipes.strategies.base import Collective
from ddp_recipes.tools.dry_run.memory import ReplicaStep
from ddp_recipes.tools.dry_run.simulation import PipelineSteps
from ddp_recipes.training.state import gather_state


def samples_of(plan: BatchPlan, shard: int) -> int:
    """Return how many samples of an epoch are in a shard; batches but the last one are alike."""
    return (plan.num_batches - 1) * plan.size(0, shard) + plan.size(plan.num_batches - 1, shard)


def samples_seen(plan: BatchPlan, batches: int) -> int:
    """Return how many samples so many batches hold, over as many epochs as they take."""
    epochs, rest = divmod(batches, plan.num_batches)
    return epochs * epoch_of(plan) + min(rest * plan.global_batch_size, epoch_of(plan))


def epoch_of(plan: BatchPlan) -> int:
    """Return how many samples an epoch holds."""
    return (plan.num_batches - 1) * plan.global_batch_size + plan.size(plan.num_batches - 1)


def batches_of(steps: int, batches_an_epoch: int, accumulate: int) -> int:
    """Return how many batches so many optimizer steps take; the last one of an epoch may take fewer."""
    epochs, rest = divmod(steps, -(-batches_an_epoch // accumulate))
    return epochs * batches_an_epoch + rest * accumulate


def sent(collectives: Sequence[Collective], times: Mapping[str, int]) -> int:
    """Return the bytes that a rank sends at least in an optimizer step.

    An all-reduce of S bytes among n takes 2 (n - 1) / n S from each (Patarasuk and Yuan, "Bandwidth optimal all-reduce
    algorithms for clusters of workstations", 2009); a reduce-scatter or an all-to-all of S bytes (n - 1) / n S; an
    all-gather of S bytes each (n - 1) S. The buffers that rank 0 broadcasts are left out.
    """
    return round(sum(times[each.every] * each.bytes * _factor(each.kind, len(each.ranks)) for each in collectives))


def leaving(collectives: Sequence[Collective], times: Mapping[str, int], world: World) -> float:
    """Return the bytes that an optimizer step has leave each node at least, or each rank of a single node."""
    sharing, found = world.local_world_size if world.nnodes > 1 else 1, 0.0  # ranks that share a link
    for each in collectives:
        links = len({rank // sharing for rank in each.ranks})
        givers = sharing if each.kind != "all_reduced" else sharing * links / len(each.ranks)  # one of a group
        found += times[each.every] * each.bytes * _factor(each.kind, links) * givers
    return found


def _factor(kind: str, n: int) -> float:
    """Return how often what one of ``n`` gives to a collective leaves it."""
    return {"all_reduced": 2 * (n - 1) / n, "gathered": n - 1, "broadcast": 0}.get(kind, (n - 1) / n)


def leaving_of_pipelines(reduced: Sequence[int], passed: Sequence[tuple[int, int]], world: World, ranks: int) -> int:
    """Return the bytes that leave one link at least in a step of pipelines: the link that most leave.

    A stage's gradients are added up over the links that have a replica of it; what crosses a cut leaves a link where
    its two sides have different ones.

    Args:
        reduced: bytes that each process of a replica gives to all-reduces.
        passed: bytes that cross each cut of a replica, forward and backward.
        ranks: that share a link: those of a node, or 1.
    """
    processes, leaving = len(reduced), Counter[int]()
    for process, size in enumerate(reduced):
        links = {rank // ranks for rank in range(process, world.world_size, processes)}
        for link in links:
            leaving[link] += round(2 * (len(links) - 1) / len(links) * size)
    for first in range(0, world.world_size, processes):
        for cut, (forward, backward) in enumerate(passed, start=1):
            before, after = ((first + stage % processes) // ranks for stage in (cut - 1, cut))
            if before != after:
                leaving[before] += forward
                leaving[after] += backward
    return max(leaving.values())


def link_seconds(leaving: float, gbps: float) -> float:
    """Return the seconds that so many bytes take at least to leave a link, if all of it is at the link's full speed.

    What is within a node takes no time. Some of it may overlap with computing.

    Args:
        gbps: of the link, each way, in 10^9 bits a second.
    """
    return leaving * 8 / (gbps * 1e9)


KINDS = get_args(Collective.__annotations__["kind"])


def exchange_of(recipe: Recipe, step: ReplicaStep | PipelineSteps) -> dict[str, Any]:
    """Return what a rank gives to others; where ranks differ, the most that one gives."""
    if isinstance(step, PipelineSteps):
        return _of_pipelines(recipe, step)
    collectives, trainer, given = step.exchange.sent, recipe.trainer, Counter[str]()
    clips = trainer.gradient_clip_val is not None and trainer.gradient_clip_algorithm == "norm"
    times = {"batch": trainer.accumulate_grad_batches, "step": 1, "norm": int(clips)}
    for each in collectives:
        given[each.kind] += times[each.every] * each.bytes
    return {
        **{f"{kind}_bytes": given[kind] for kind in KINDS},
        "passed_bytes": 0,
        "sent_bytes_a_rank": sent(collectives, times),
        "at_least_seconds": _seconds(recipe, leaving(collectives, times, recipe.world)),
    }


def _of_pipelines(recipe: Recipe, step: PipelineSteps) -> dict[str, Any]:
    """Activations are sent between stages in each batch, gradients added up once a step."""
    world, times, reduced = recipe.world, recipe.trainer.accumulate_grad_batches, step.reduced
    passed = [(times * forward, times * backward) for forward, backward in step.passed or ()]
    link = world.local_world_size if world.nnodes > 1 else 1
    known = step.passed is not None
    return {
        **dict.fromkeys((f"{kind}_bytes" for kind in KINDS), 0),
        "all_reduced_bytes": max(reduced),
        "passed_bytes": leaving_of_pipelines([0] * len(reduced), passed, world, 1) if known else None,
        "sent_bytes_a_rank": leaving_of_pipelines(reduced, passed, world, 1),
        "at_least_seconds": _seconds(recipe, leaving_of_pipelines(reduced, passed, world, link)),
    }


def _seconds(recipe: Recipe, sent_bytes: float) -> float | None:
    gbps = recipe.request.cluster.interconnect_gbps
    return None if gbps is None else link_seconds(sent_bytes, gbps)


def checkpoint_bytes(recipe: Recipe, step: ReplicaStep | PipelineSteps) -> int:
    """Return the size of a checkpoint: it is written to where only the bytes are counted, with no data in it."""
    run = make_run(recipe, make_stop_controller(recipe), Single())  # there is nobody to gather from
    names, steps = [], recipe.total_steps
    if steps != 0:
        names = [f"train/{name}" for name in ("loss", "lr", "samples_per_second", "epoch", "grad_norm")]
    names += [f"{split}/{name}" for split in run.val for name in ("loss", *recipe.task.metrics)]
    state = gather_state(run) | {
        **step.state(),
        "metrics": dict.fromkeys(names, 0.0),
        "world_size": recipe.world.world_size,
        "checkpointer": {"values": {"1": 0.0}},
    }
    sink = _Counted()
    with step.mode, skip_data(materialize_fake_tensors=True):
        torch.save({"format": FORMAT, **state}, sink)  # type: ignore[arg-type]
    return sink.size


class _Counted:
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

    def flush(self) -> None:
        """Do nothing: nothing is held back."""
