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
from ddp_recipes.tools.dry_run.findings import findings
from ddp_recipes.tools.dry_run.fitting import fit
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
    table("dry run", rows(planned), sys.stdout)
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
    steps, accumulate = recipe.total_steps, recipe.trainer.accumulate_grad_batches
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


def rows(planned: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the plan as names and values, the most telling first."""
    cluster, exchange = planned["cluster"], planned["exchange"]
    nodes = f"{cluster['nnodes']:,} node(s)"
    if planned["device"] != HOST:
        memory = cluster["gpu_memory_bytes"]
        nodes += f", {cluster['gpus_per_node']} GPUs each" + ("" if memory is None else f" of {in_bytes(memory)}")
    found = [
        ("cluster", nodes),
        *((f"rank {rank['rank']}", placed(rank)) for rank in planned["ranks"][:SHOWN]),
    ]
    if (more := planned["world_size"] - SHOWN) > 0:
        found.append(("…", f"and {more:,} more, in plan.json"))
    found += batches(planned)
    staged = (planned["pipeline"] or {}).get("stages_per_process")
    for number, each in enumerate(planned["memory"] or ()):
        whose = "stage" if staged is None else "process"
        name = "memory" if len(planned["memory"]) == 1 else f"memory of {whose} {number}"
        found.append((name, memory_of(each) + (", all devices together" if planned["memory_of_replica"] else "")))
    found += planned["data"].items()
    found.append(("exchanged a step", exchanged(exchange)))
    if planned["pipeline"] is not None:
        pipeline = planned["pipeline"]
        found.append(
            (
                "bubble",
                f"{pipeline['bubble']:.0%} of a step: {pipeline['stages']} stages, "
                f"{pipeline['micro_batches']} micro-batch(es)"
                + ("" if staged is None else f", {pipeline['schedule']}"),
            )
        )
    return [*found, ("checkpoint", in_bytes(planned["checkpoint_bytes"]))]


def placed(rank: dict[str, Any]) -> str:
    """Say where a rank is, and what it has."""
    stages = f"stage {' '.join(map(str, rank['stages']))}, " if "stages" in rank else ""
    return f"node {rank['node']}, {' '.join(rank['devices'])}: {stages}{rank['samples_an_epoch']:,} samples an epoch"


def batches(planned: dict[str, Any]) -> list[tuple[str, str]]:
    """Say how long the run is."""
    dropped = planned["samples_dropped_an_epoch"]
    steps = planned["steps"]
    size = f"{planned['global_batch_size']:,} samples, {planned['batch_size']:,} in a shard"
    if planned["accumulate_grad_batches"] > 1:
        size += f"; {planned['accumulate_grad_batches']} of them a step"
    return [
        ("global batch", size),
        (
            "epoch",
            f"{planned['samples_an_epoch']:,} samples in {planned['batches_an_epoch']:,} batches"
            + (f", {dropped:,} dropped" if dropped else ""),
        ),
        ("steps", "until max_time" if steps is None else f"{steps:,}, {planned['samples_seen']:,} samples"),
    ]


def memory_of(device: dict[str, int]) -> str:
    """Say what a device holds."""
    names = ("weights", "gradients", "optimizer", "exchange", "batch", "activations")
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
