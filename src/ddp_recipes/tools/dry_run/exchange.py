"""What ranks send each other in an optimizer step."""

from typing import Any

from ddp_recipes.build.recipe import Recipe
from ddp_recipes.tools.dry_run import counts
from ddp_recipes.tools.dry_run.memory import ReplicaStep
from ddp_recipes.tools.dry_run.pipeline import PipelineSteps


def exchange_of(recipe: Recipe, step: ReplicaStep | PipelineSteps) -> dict[str, Any]:
    """Return what a rank gives to others; where ranks differ, the most that one gives."""
    if isinstance(step, PipelineSteps):
        return _of_pipelines(recipe, step)
    exchange, world = step.exchange, recipe.world
    times = recipe.trainer.accumulate_grad_batches if exchange.every_batch else 1
    return {
        "all_reduced_bytes": times * exchange.all_reduced,
        "scattered_bytes": times * exchange.scattered,
        "gathered_bytes": times * exchange.gathered,
        "broadcast_bytes": times * exchange.broadcast,
        "passed_bytes": 0,
        "sent_bytes_a_rank": times * counts.sent(exchange, world),
        "at_least_seconds": _seconds(recipe, times * counts.leaving(exchange, world)),
    }


def _of_pipelines(recipe: Recipe, step: PipelineSteps) -> dict[str, Any]:
    """Activations are sent between stages in each batch, gradients added up once a step."""
    world, times, reduced = recipe.world, recipe.trainer.accumulate_grad_batches, step.reduced
    passed = [(times * forward, times * backward) for forward, backward in step.passed or ()]
    link = world.local_world_size if world.nnodes > 1 else 1
    known = step.passed is not None
    return {
        "all_reduced_bytes": max(reduced),
        "scattered_bytes": 0,
        "gathered_bytes": 0,
        "broadcast_bytes": 0,
        "passed_bytes": counts.leaving_of_pipelines([0] * len(reduced), passed, world, 1) if known else None,
        "sent_bytes_a_rank": counts.leaving_of_pipelines(reduced, passed, world, 1),
        "at_least_seconds": _seconds(recipe, counts.leaving_of_pipelines(reduced, passed, world, link)),
    }


def _seconds(recipe: Recipe, leaving: float) -> float | None:
    gbps = recipe.request.cluster.interconnect_gbps
    return None if gbps is None else counts.link_seconds(leaving, gbps)
