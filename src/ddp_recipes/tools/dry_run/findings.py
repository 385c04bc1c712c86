"""What a plan shows to be wrong, or less than it could be."""

from typing import Any

from ddp_recipes.build.recipe import Recipe
from ddp_recipes.devices import HOST
from ddp_recipes.reporting.progress import in_bytes
from ddp_recipes.strategies.base import batch_norms
from ddp_recipes.tools.dry_run.memory import ReplicaStep
from ddp_recipes.tools.dry_run.simulation import PipelineSteps


def findings(recipe: Recipe, step: ReplicaStep | PipelineSteps, planned: dict[str, Any]) -> list[dict[str, str]]:
    """Return what was found, each with a ``kind`` to look for and a ``message`` to read."""
    found = {
        "devices_left_over": devices_left_over(recipe, planned),
        "batch_norm_without_sync": batch_norm_without_sync(recipe),
        "unused_parameters": unused_parameters(recipe, step),
        "pipeline_not_filled": pipeline_not_filled(recipe, planned),
        "memory_does_not_fit": memory_does_not_fit(recipe, planned),
        "not_rehearsed": None
        if step.failure is None
        else f"A step could not be run without data, so activations and the peak of memory are not known: "
        f"{step.failure}",
    }
    return [{"kind": kind, "message": message} for kind, message in found.items() if message is not None]


def devices_left_over(recipe: Recipe, planned: dict[str, Any]) -> str | None:
    """Find GPUs that no rank has."""
    left, k = planned["devices_left_over"], planned["devices_per_replica"]
    if not left:
        return None
    cluster = planned["cluster"]
    text = f"{left} of {cluster['nnodes'] * cluster['gpus_per_node']} GPUs are left over: "
    if recipe.request.strategy.max_world_size == 1:
        return f"{text}strategy={planned['strategy']} runs in one process. {recipe.request.strategy.for_more_processes}"
    if recipe.request.launcher.nproc_per_node != "auto":
        return f"{text}launcher.nproc_per_node={recipe.request.launcher.nproc_per_node}. Use auto."
    if (pipeline := recipe.request.strategy.pipeline) is not None:
        takes = f"{pipeline.stages_key}={pipeline.stages} takes {k} GPUs for each replica"
        return f"{text}{takes}, and nodes have {cluster['gpus_per_node']}."
    return f"{text}model.num_devices={k} does not divide the {cluster['gpus_per_node']} of a node."


def batch_norm_without_sync(recipe: Recipe) -> str | None:
    """Find batch norm whose statistics are those of some samples of the batch."""
    norms, plan, pipeline = batch_norms(recipe.task), recipe.loaders["train"].plan, recipe.request.strategy.pipeline
    micro_batches = recipe.request.model.micro_batches if pipeline is None else pipeline.micro_batches
    if not norms or plan.num_shards * micro_batches == 1 or recipe.request.strategy.synchronises_batch_norm:
        return None
    kind = recipe.devices.type
    can = micro_batches == 1 and kind != HOST
    remedy = recipe.request.strategy.batch_norm_remedy(kind) if can else ""
    return (
        f"Batch norm ({len(norms)} module(s)) takes its statistics from {-(-plan.size(0, 0) // micro_batches)} of the "
        f"{plan.size(0)} samples of a batch.{remedy and f' {remedy}'}"
    )


def unused_parameters(recipe: Recipe, step: ReplicaStep | PipelineSteps) -> str | None:
    """Find parameters that the loss does not depend on, where the strategy minds."""
    consequence = recipe.request.strategy.unused_parameters()
    if not step.unused or recipe.world.world_size == 1 or not consequence:
        return None
    names = ", ".join(step.unused[:4]) + (", …" if len(step.unused) > 4 else "")
    return f"The loss does not depend on {len(step.unused)} parameter(s): {names}. {consequence}"


def pipeline_not_filled(recipe: Recipe, planned: dict[str, Any]) -> str | None:
    """Find a pipeline that is never full, because there are fewer micro-batches than stages."""
    pipeline, processes = planned["pipeline"], recipe.request.strategy.pipeline
    if pipeline is None:
        return None
    key, asked, who = "model.micro_batches", recipe.request.model.micro_batches, "devices"
    if processes is not None:
        key, asked, who = processes.micro_batches_key, processes.micro_batches, "processes"
    there, working = min(asked, planned["batch_size"]), planned["devices_per_replica"]
    if there >= max(asked, working):
        return None
    idle = f"Each of {working} {who} has nothing to do for {pipeline['bubble']:.0%} of a step"
    if there < asked:
        return (
            f"{idle}: a replica's batch of {planned['batch_size']} samples is too small for {key}={asked}. Use a "
            f"larger data.batch_size, or fewer of them."
        )
    return f"{idle}: micro-batches are fewer than {who}. Use {key}={4 * working}, or at least {working}."


def memory_does_not_fit(recipe: Recipe, planned: dict[str, Any]) -> str | None:
    """Find memory that is not there."""
    if planned.get("fits") is not False:
        return None
    k, pipeline = planned["devices_per_replica"], recipe.request.strategy.pipeline
    there = planned["cluster"]["gpu_memory_bytes"] * (k if planned["memory_of_replica"] else 1)
    needed = max(each["peak"] for each in planned["memory"])
    text = f"A step takes {in_bytes(needed)} of a device that has {in_bytes(there)}."
    if planned["memory_of_replica"]:
        text = f"A step takes {in_bytes(needed)} in all of the {k} devices of a replica, which have {in_bytes(there)}."
    with_ = [f"{each['overrides']} ({in_bytes(each['peak'])})" for each in planned["would_fit"]]
    if pipeline is not None or (recipe.request.strategy.kind == "replicated" and recipe.devices.type != HOST):
        key = "model.num_devices" if pipeline is None else pipeline.stages_key
        smallest = planned["smallest_k" if pipeline is None else "smallest_stages"]
        none = "devices that a node has" if pipeline is None else "stages that there are GPUs for"
        if smallest is not None:
            text += f" It fits with {key}={smallest}, the smallest number that it fits with."
        else:
            text += f" No number of {none} makes it fit."
        if smallest is not None and not with_:
            return text
    if with_:
        return f"{text} It {'also ' * ('It fits' in text)}fits with {', or with '.join(with_)}."
    return (
        f"{text} No other strategy or level, activation checkpointing, smaller batches or offload make it fit, nor all "
        f"of them. Use trainer.precision=bf16-mixed, more devices, or GPUs with more memory."
    )
