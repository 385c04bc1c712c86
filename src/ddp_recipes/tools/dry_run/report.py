"""A plan as a person reads it."""

from typing import Any

from ddp_recipes.devices import HOST
from ddp_recipes.reporting.progress import in_bytes

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
