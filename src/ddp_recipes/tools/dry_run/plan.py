"""``plan=true``: what the config as given would do and take on a cluster, and what is wrong, as a person reads it."""

import json
import logging
import sys
from dataclasses import replace
from typing import Any

from ddp_recipes.build.recipe import Recipe
from ddp_recipes.devices import HOST, memory_of_one, names
from ddp_recipes.model_parallel.timeline import bubble, cells_of
from ddp_recipes.output import Output
from ddp_recipes.reporting.progress import in_bytes, table
from ddp_recipes.reporting.run_directory import write_text
from ddp_recipes.tools.dry_run import counts
from ddp_recipes.tools.dry_run.cluster import Layout
from ddp_recipes.tools.dry_run.counts import checkpoint_bytes, exchange_of
from ddp_recipes.tools.dry_run.findings import findings, fit
from ddp_recipes.tools.dry_run.memory import STATE
from ddp_recipes.tools.dry_run.replica import run_step, shape_of

log = logging.getLogger(__name__)

Plan = dict[str, Any]


def plan(recipe: Recipe, output: Output) -> None:
    """Print the plan, and write it to ``plan.json``.

    Raises:
        RequestError: there is no dry run of what the config asks for.
    """
    planned = make_plan(recipe)
    output.open(None)
    table("dry run", [*rows(planned).items()], sys.stdout)
    for finding in planned["findings"]:
        log.warning("%s", finding["message"])
    write_text(recipe.job.directory / "plan.json", as_text(planned))


def make_plan(recipe: Recipe) -> Plan:
    """Return what goes into ``plan.json``."""
    layout = recipe.devices.layout
    assert layout is not None
    recipe.request.strategy.check_dry_run(layout.device_type, layout.gpus)
    replica = run_step(recipe)
    capacity = capacity_of(recipe, layout)
    planned = {
        **layout_of(recipe, layout, capacity),
        **batches_of(recipe),
        "memory": None if replica.failure else replica.memory,
        "memory_of_replica": replica.whole,
        "exchange": exchange_of(recipe, replica),
        "pipeline": pipeline_of(recipe),
        "checkpoint_bytes": checkpoint_bytes(recipe, replica),
        "data": data_of(recipe),
    }
    fits = fit(recipe, replica, capacity) if capacity is not None else {}
    return {**planned, **fits, "findings": findings(recipe, replica, {**planned, **fits})}


def capacity_of(recipe: Recipe, layout: Layout) -> int | None:
    """Return the bytes of a device, where they are stated or it is one of this machine's GPUs."""
    cluster = recipe.request.cluster
    if cluster.gpu_memory_gb is not None:
        return round(cluster.gpu_memory_gb * 1e9)
    return memory_of_one(layout.device_type) if cluster.gpus_per_node is None else None


def layout_of(recipe: Recipe, layout: Layout, capacity: int | None) -> Plan:
    """Return which rank is where, and what it has."""
    world, k, kind = layout.world, recipe.request.num_devices, layout.device_type
    plan_, pipeline = recipe.loaders["train"].plan, recipe.request.strategy.pipeline
    samples = {shard: counts.samples_of(plan_, shard) for shard in range(plan_.num_shards)}
    ranks = []
    for rank in range(world.world_size):
        node, local = divmod(rank, world.local_world_size)
        devices = names(kind, k, local * k)
        shards = recipe.request.strategy.batch_shards(replace(world, rank=rank))
        dealt = sum(samples[shard] for shard in shards.numbers)
        ranks.append({"rank": rank, "node": node, "devices": devices, "samples_an_epoch": dealt})
        if pipeline is not None:
            ranks[-1]["stages"] = pipeline.stages_of(rank)
    return {
        "cluster": {
            "nnodes": layout.nnodes,
            "gpus_per_node": layout.gpus,
            "gpu_memory_bytes": capacity,
            "interconnect_gbps": recipe.request.cluster.interconnect_gbps,
        },
        "device": layout.device_type,
        "strategy": recipe.request.strategy.name,
        "world_size": world.world_size,
        "replicas": recipe.request.strategy.batch_shards(world).readers,
        "devices_per_replica": k if pipeline is None else pipeline.processes,
        "devices_left_over": layout.nnodes * layout.gpus - world.world_size * k if kind != HOST else 0,
        "ranks": ranks,
    }


def batches_of(recipe: Recipe) -> Plan:
    """Return how many samples, batches and steps there are."""
    train = recipe.loaders["train"]
    steps, accumulate = recipe.length.total_steps, recipe.trainer.accumulate_grad_batches
    epoch = counts.samples_of(train.plan)
    return {
        "global_batch_size": train.plan.global_batch_size,
        "batch_size": train.plan.size(0, 0),
        "accumulate_grad_batches": accumulate,
        "batches_an_epoch": len(train),
        "steps_an_epoch": recipe.length.steps_in(1),
        "steps": steps,
        "samples": train.plan.num_samples,
        "samples_an_epoch": epoch,
        "samples_dropped_an_epoch": train.plan.num_samples - epoch,
        "samples_seen": None if steps is None else counts.samples_seen(train.plan, steps, accumulate),
    }


def data_of(recipe: Recipe) -> dict[str, str]:
    """Return what the training set says of this plan, where it has a method ``plan_rows``."""
    train = recipe.loaders["train"]
    rows = getattr(train.dataset, "plan_rows", None)
    return dict(rows(train.plan)) if callable(rows) else {}


def pipeline_of(recipe: Recipe) -> Plan | None:
    """Return how long the devices of a replica have nothing to do, where it has several."""
    shape, staged = shape_of(recipe), recipe.request.strategy.pipeline is not None
    if not staged:
        shape = replace(shape, micro_batches=min(shape.micro_batches, recipe.loaders["train"].plan.size(0, 0)))
    if shape.stages == 1:
        return None
    return {
        "schedule": shape.schedule,
        "stages": shape.stages,
        **({"stages_per_process": shape.each} if staged else {}),
        "micro_batches": shape.micro_batches,
        "bubble": bubble(cells_of(shape)),
    }


def as_text(planned: Plan) -> str:
    """Return the plan as JSON, a line for each rank."""
    ranks = ",\n    ".join(json.dumps(rank) for rank in planned["ranks"])
    return json.dumps({**planned, "ranks": []}, indent=2).replace('"ranks": []', f'"ranks": [\n    {ranks}\n  ]') + "\n"


SHOWN = 2  # ranks


def rows(planned: Plan) -> dict[str, str]:
    """Return the plan as names and values, the most telling first."""
    cluster, memory, pipeline = planned["cluster"], planned["memory"] or (), planned["pipeline"] or {}
    found = {"cluster": f"{cluster['nnodes']:,} node(s)"}
    if planned["device"] != HOST:
        found["cluster"] += f", {cluster['gpus_per_node']} GPUs each"
        if cluster["gpu_memory_bytes"] is not None:
            found["cluster"] += f" of {in_bytes(cluster['gpu_memory_bytes'])}"
    found |= {f"rank {rank['rank']}": placed(rank) for rank in planned["ranks"][:SHOWN]}
    if (more := planned["world_size"] - SHOWN) > 0:
        found["…"] = f"and {more:,} more, in plan.json"
    found["global batch"] = "{global_batch_size:,} samples, {batch_size:,} in a shard".format_map(planned)
    if planned["accumulate_grad_batches"] > 1:
        found["global batch"] += f"; {planned['accumulate_grad_batches']} of them a step"
    found["epoch"] = "{samples_an_epoch:,} samples in {batches_an_epoch:,} batches".format_map(planned)
    if dropped := planned["samples_dropped_an_epoch"]:
        found["epoch"] += f", {dropped:,} dropped"
    steps = "until max_time" if planned["steps"] is None else "{steps:,}, {samples_seen:,} samples"
    found["steps"] = steps.format_map(planned)
    whose = "process" if "stages_per_process" in pipeline else "stage"
    for number, each in enumerate(memory):
        name = "memory" if len(memory) == 1 else f"memory of {whose} {number}"
        found[name] = memory_of(each) + (", all devices together" if planned["memory_of_replica"] else "")
    found |= planned["data"]
    found["exchanged a step"] = exchanged(planned["exchange"])
    if pipeline:
        bubble = "{bubble:.0%} of a step: {stages} stages, {micro_batches} micro-batch(es)".format_map(pipeline)
        found["bubble"] = bubble + (f", {pipeline['schedule']}" if "stages_per_process" in pipeline else "")
    if planned["checkpoint_bytes"] is not None:
        found["checkpoint"] = in_bytes(planned["checkpoint_bytes"])
    return found


def placed(rank: dict[str, Any]) -> str:
    """Say where a rank is, and what it has."""
    stages = f"stage {' '.join(map(str, rank['stages']))}, " if "stages" in rank else ""
    return f"node {rank['node']}, {' '.join(rank['devices'])}: {stages}{rank['samples_an_epoch']:,} samples an epoch"


def memory_of(device: dict[str, int]) -> str:
    """Say what a device holds."""
    names = (*STATE, "batch", "activations")
    parts = ", ".join(f"{name} {in_bytes(device[name])}" for name in names if device[name])
    validation = f", {in_bytes(device['validation'])} in validation" if device["validation"] else ""
    return f"{in_bytes(device['training'])} in training ({parts}){validation}"


def exchanged(exchange: dict[str, Any]) -> str:
    """Say what ranks send each other."""
    kinds = {
        "all_reduced": "all-reduce",
        "reduce_scattered": "reduce-scatter",
        "scattered": "all-to-all",
        "gathered": "all-gather",
        "broadcast": "broadcast",
        "passed": "sent between stages",
    }
    sent = [f"{name} {in_bytes(exchange[f'{key}_bytes'])}" for key, name in kinds.items() if exchange[f"{key}_bytes"]]
    bound = exchange["at_least_seconds"]
    return (", ".join(sent) or "nothing") + ("" if bound is None else f"; at least {bound * 1e3:.3g} ms")
