"""What ranks send each other in an optimizer step."""

from collections import Counter
from typing import Any, get_args

from ddp_recipes.build.recipe import Recipe
from ddp_recipes.strategies.base import Collective
from ddp_recipes.tools.dry_run import counts
from ddp_recipes.tools.dry_run.memory import ReplicaStep
from ddp_recipes.tools.dry_run.pipeline import PipelineSteps

KINDS = get_args(Collective.__annotations__["kind"])


def exchange_of(recipe: Recipe, step: ReplicaStep | PipelineSteps) -> dict[str, Any]:
    """Return what a rank gives to others; where ranks differ, the most that one gives."""
    if isinstance(step, PipelineSteps):
        return _of_pipelines(recipe, step)
    sent, trainer, given = step.exchange.sent, recipe.trainer, Counter[str]()
    clips = trainer.gradient_clip_val is not None and trainer.gradient_clip_algorithm == "norm"
    times = {"batch": trainer.accumulate_grad_batches, "step": 1, "norm": int(clips)}
    for each in sent:
        given[each.kind] += times[each.every] * each.bytes
    return {
        **{f"{kind}_bytes": given[kind] for kind in KINDS},
        "passed_bytes": 0,
        "sent_bytes_a_rank": counts.sent(sent, times),
        "at_least_seconds": _seconds(recipe, counts.leaving(sent, times, recipe.world)),
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
        "passed_bytes": counts.leaving_of_pipelines([0] * len(reduced), passed, world, 1) if known else None,
        "sent_bytes_a_rank": counts.leaving_of_pipelines(reduced, passed, world, 1),
        "at_least_seconds": _seconds(recipe, counts.leaving_of_pipelines(reduced, passed, world, link)),
    }


def _seconds(recipe: Recipe, leaving: float) -> float | None:
    gbps = recipe.request.cluster.interconnect_gbps
    return None if gbps is None else counts.link_seconds(leaving, gbps)
