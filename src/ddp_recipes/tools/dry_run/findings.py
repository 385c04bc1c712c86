"""What a plan shows to be wrong, or less than it could be."""

from typing import Any

from ddp_recipes.build.recipe import Recipe
from ddp_recipes.devices import HOST
from ddp_recipes.reporting.progress import in_bytes
from ddp_recipes.strategies.base import batch_norms
from ddp_recipes.tools.dry_run.replica import Replica, shape_of


def findings(recipe: Recipe, replica: Replica, planned: dict[str, Any]) -> list[dict[str, str]]:
    """Return what was found, each with a ``kind`` to look for and a ``message`` to read."""
    found = {
        "devices_left_over": devices_left_over(recipe, planned),
        "batch_norm_without_sync": batch_norm_without_sync(recipe),
        "unused_parameters": unused_parameters(recipe, replica),
        "pipeline_not_filled": pipeline_not_filled(recipe, planned),
        "memory_does_not_fit": memory_does_not_fit(recipe, planned),
        "not_rehearsed": replica.failure
        and f"A step could not be run without data, so activations and the peak of memory are not known: "
        f"{replica.failure}",
    }
    return [{"kind": kind, "message": message} for kind, message in found.items() if message is not None]


def devices_left_over(recipe: Recipe, planned: dict[str, Any]) -> str | None:
    """Find GPUs that no rank has."""
    left, cluster, shape = planned["devices_left_over"], planned["cluster"], shape_of(recipe)
    if not left:
        return None
    text = f"{left} of {cluster['nnodes'] * cluster['gpus_per_node']} GPUs are left over: "
    if recipe.request.strategy.max_world_size == 1:
        return f"{text}strategy={planned['strategy']} runs in one process. {recipe.request.strategy.for_more_processes}"
    if recipe.request.launcher.nproc_per_node != "auto":
        return f"{text}launcher.nproc_per_node={recipe.request.launcher.nproc_per_node}. Use auto."
    if recipe.request.strategy.pipeline is not None:
        takes = f"{shape.stages_key}={shape.stages} takes {shape.processes} GPUs for each replica"
        return f"{text}{takes}, and nodes have {cluster['gpus_per_node']}."
    return f"{text}model.num_devices={shape.stages} does not divide the {cluster['gpus_per_node']} of a node."


def batch_norm_without_sync(recipe: Recipe) -> str | None:
    """Find batch norm whose statistics are those of some samples of the batch."""
    norms, plan, micro_batches = (
        batch_norms(recipe.task),
        recipe.loaders["train"].plan,
        shape_of(recipe).micro_batches,
    )
    if not norms or plan.num_shards * micro_batches == 1 or recipe.request.strategy.synchronises_batch_norm:
        return None
    kind = recipe.devices.type
    can = micro_batches == 1 and kind != HOST
    remedy = recipe.request.strategy.batch_norm_remedy(kind) if can else ""
    return (
        f"Batch norm ({len(norms)} module(s)) takes its statistics from {-(-plan.size(0, 0) // micro_batches)} of the "
        f"{plan.size(0)} samples of a batch.{remedy and f' {remedy}'}"
    )


def unused_parameters(recipe: Recipe, replica: Replica) -> str | None:
    """Find parameters that the loss does not depend on, where the strategy minds."""
    consequence, unused = recipe.request.strategy.unused_parameters(), replica.unused
    if not unused or recipe.world.world_size == 1 or not consequence:
        return None
    names = ", ".join(unused[:4]) + (", …" if len(unused) > 4 else "")
    return f"The loss does not depend on {len(unused)} parameter(s): {names}. {consequence}"


def pipeline_not_filled(recipe: Recipe, planned: dict[str, Any]) -> str | None:
    """Find a pipeline that is never full, because there are fewer micro-batches than stages."""
    shape, size = shape_of(recipe), planned["batch_size"]
    there = min(shape.micro_batches, size)
    if planned["pipeline"] is None or there >= max(shape.micro_batches, shape.processes):
        return None
    who = "devices" if recipe.request.strategy.pipeline is None else "processes"
    waiting = f"{planned['pipeline']['bubble']:.0%} of a step"
    idle = f"Each of {shape.processes} {who} has nothing to do for {waiting}"
    if there < shape.micro_batches:
        return (
            f"{idle}: a replica's batch of {size} samples is too small for {shape.micro_batches_key}="
            f"{shape.micro_batches}. Use a larger data.batch_size, or fewer of them."
        )
    enough = f"{shape.micro_batches_key}={4 * shape.processes}, or at least {shape.processes}"
    return f"{idle}: micro-batches are fewer than {who}. Use {enough}."


def memory_does_not_fit(recipe: Recipe, planned: dict[str, Any]) -> str | None:
    """Find memory that is not there."""
    if planned.get("fits") is not False:
        return None
    strategy, k, there = recipe.request.strategy, planned["devices_per_replica"], planned["cluster"]["gpu_memory_bytes"]
    needed = in_bytes(max(each["peak"] for each in planned["memory"]))
    text = f"A step takes {needed} of a device that has {in_bytes(there)}."
    if planned["memory_of_replica"]:
        text = f"A step takes {needed} in all of the {k} devices of a replica, which have {in_bytes(k * there)}."
    with_ = [f"{each['overrides']} ({in_bytes(each['peak'])})" for each in planned["would_fit"]]
    if strategy.pipeline is not None or (strategy.kind == "replicated" and recipe.devices.type != HOST):
        smallest = planned.get("smallest_k", planned.get("smallest_stages"))
        if smallest is not None:
            key = shape_of(recipe).stages_key
            text += f" It fits with {key}={smallest}, the smallest number that it fits with."
            if not with_:
                return text
        else:
            none = "devices that a node has" if strategy.pipeline is None else "stages that there are GPUs for"
            text += f" No number of {none} makes it fit."
    if with_:
        return f"{text} It {'also ' * ('It fits' in text)}fits with {', or with '.join(with_)}."
    return (
        f"{text} No other strategy or level, activation checkpointing, smaller batches or offload make it fit, nor all "
        f"of them. Use trainer.precision=bf16-mixed, more devices, or GPUs with more memory."
    )
