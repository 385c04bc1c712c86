"""``plan=true``: the run on paper. What the config as given would do and take on a cluster, and what is wrong."""

import json
import logging
import os
import sys
from dataclasses import asdict, replace
from typing import Any

import torch
from torch.serialization import skip_data

from ddp_recipes.checkpoint import FORMAT
from ddp_recipes.errors import RequestError
from ddp_recipes.loop import gather_state
from ddp_recipes.model_parallel.timeline import bubble, order, timeline
from ddp_recipes.output import Output
from ddp_recipes.planning import counts
from ddp_recipes.planning.findings import findings
from ddp_recipes.planning.memory import Batches, Rehearsed
from ddp_recipes.planning.report import rows
from ddp_recipes.progress import table
from ddp_recipes.recipe import Recipe
from ddp_recipes.request import Layout
from ddp_recipes.run_directory import write_text
from ddp_recipes.world import World

log = logging.getLogger(__name__)

Plan = dict[str, Any]


def plan(recipe: Recipe, output: Output) -> None:
    """Print the plan, and write it to ``plan.json``.

    Raises:
        RequestError: it is of something that has not been put on paper.
    """
    planned = make_plan(recipe)
    output.open(None)
    table("on paper", rows(planned), sys.stdout)
    for finding in planned["findings"]:
        log.warning("%s", finding["message"])
    write_text(recipe.job.directory / "plan.json", as_text(planned))


def make_plan(recipe: Recipe) -> Plan:
    """Return what goes into ``plan.json``."""
    assert recipe.layout is not None
    if recipe.strategy.name == "dp" and recipe.layout.device_type == "cuda" and recipe.layout.gpus > 1:
        raise RequestError(
            "plan=true does not know strategy=dp on several GPUs, where one process drives them all. Use strategy=ddp."
        )
    rehearsed = rehearse(recipe)
    capacity = capacity_of(recipe, recipe.layout)
    planned = {
        **layout_of(recipe, recipe.layout, capacity),
        **batches_of(recipe),
        "memory": None if rehearsed.failure else [asdict(each) | {"peak": each.peak} for each in rehearsed.memory()],
        "memory_of_replica": rehearsed.whole,
        "exchange": exchange_of(recipe, rehearsed),
        "pipeline": pipeline_of(recipe),
        "checkpoint_bytes": checkpoint_bytes(recipe, rehearsed),
    }
    fits = fit(recipe, rehearsed, capacity) if capacity is not None else {}
    return {**planned, **fits, "findings": findings(recipe, rehearsed, {**planned, **fits})}


def rehearse(recipe: Recipe) -> Rehearsed:
    """Run a step of the recipe on paper, on the devices of one replica.

    A model that places itself knows no devices but those it was made for, and the CPU has one memory: then all is on
    one device.
    """
    assert recipe.layout is not None
    starts = [stage.first for stage in recipe.stages[1:]]
    devices = [torch.device("cuda", number) for number in range(len(starts) + 1)]
    whole = recipe.layout.device_type == "cpu" or (recipe.request.num_devices > 1 and not starts)
    if whole:
        starts, devices = [], [torch.device("cpu")]
    train, val = recipe.loaders["train"], recipe.loaders.get("val")
    return Rehearsed(
        recipe.task,
        starts,
        devices,
        recipe.strategy,
        recipe.world,
        recipe.optimizer_of,
        Batches(
            (train.sample(), train.plan.share(0, 0)),
            None if val is None else (val.sample(), val.plan.share(0, 0)),
            min(recipe.trainer.accumulate_grad_batches, len(train)),
        ),
        recipe.trainer.precision,
        whole=whole and recipe.request.num_devices > 1,
    )


def capacity_of(recipe: Recipe, layout: Layout) -> int | None:
    """Return the bytes of a device, where they are stated or it is one of this machine's GPUs."""
    cluster = recipe.request.cluster
    if cluster.gpu_memory_gb is not None:
        return round(cluster.gpu_memory_gb * 1e9)
    if layout.device_type == "cuda" and cluster.gpus_per_node is None and torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory
    return None


def layout_of(recipe: Recipe, layout: Layout, capacity: int | None) -> Plan:
    """Return which rank is where."""
    world, k, cuda = layout.world, recipe.request.num_devices, layout.device_type == "cuda"
    plan_, parts = recipe.loaders["train"].plan, len(recipe.loaders["train"].parts)
    samples = {share: counts.samples_of(plan_, share) for share in range(plan_.parts)}
    ranks = []
    for rank in range(world.world_size):
        node, local = divmod(rank, world.local_world_size)
        devices = [f"cuda:{local * k + number}" for number in range(k)] if cuda else ["cpu"]
        dealt = sum(samples[part] for part in range(rank * parts, (rank + 1) * parts))
        ranks.append({"rank": rank, "node": node, "devices": devices, "samples_an_epoch": dealt})
    return {
        "cluster": {
            "nnodes": layout.nnodes,
            "gpus_per_node": layout.gpus,
            "gpu_memory_bytes": capacity,
            "interconnect_gbps": recipe.request.cluster.interconnect_gbps,
        },
        "device": layout.device_type,
        "strategy": recipe.strategy.name,
        "world_size": world.world_size,
        "replicas": world.world_size,
        "devices_per_replica": k,
        "devices_left_over": left_over(layout, k) if cuda else 0,
        "ranks": ranks,
    }


def left_over(layout: Layout, k: int) -> int:
    """Return how many GPUs of the cluster no rank has."""
    return layout.nnodes * layout.gpus - layout.world.world_size * k


def batches_of(recipe: Recipe) -> Plan:
    """Return how many samples, batches and steps there are."""
    train = recipe.loaders["train"]
    steps, accumulate = recipe.total_steps, recipe.trainer.accumulate_grad_batches
    batches = None if steps is None else counts.batches_of(steps, len(train), accumulate)
    epoch = counts.epoch_of(train.plan)
    return {
        "global_batch_size": train.plan.global_batch_size,
        "batch_size": train.plan.share(0, 0),
        "accumulate_grad_batches": accumulate,
        "batches_an_epoch": len(train),
        "steps_an_epoch": recipe.steps_per_epoch,
        "steps": steps,
        "samples": train.plan.num_samples,
        "samples_an_epoch": epoch,
        "samples_dropped_an_epoch": train.plan.num_samples - epoch,
        "samples_seen": None if batches is None else counts.samples_seen(train.plan, batches),
    }


def exchange_of(recipe: Recipe, rehearsed: Rehearsed) -> Plan:
    """Return what ranks send each other in an optimizer step."""
    exchange, gbps = rehearsed.exchange, recipe.request.cluster.interconnect_gbps
    times = recipe.trainer.accumulate_grad_batches if exchange.every_batch else 1
    bound = None
    if gbps is not None:
        bound = times * counts.link_seconds(exchange, recipe.world, gbps)
    return {
        "all_reduced_bytes": times * exchange.all_reduced,
        "scattered_bytes": times * exchange.scattered,
        "gathered_bytes": times * exchange.gathered,
        "broadcast_bytes": times * exchange.broadcast,
        "sent_bytes_a_rank": times * counts.sent(exchange, recipe.world),
        "at_least_seconds": bound,
    }


def pipeline_of(recipe: Recipe) -> Plan | None:
    """Return how long the devices of a replica have nothing to do, where it has several."""
    k, asked = recipe.request.num_devices, recipe.request.model.micro_batches
    if k == 1:
        return None
    micro_batches = min(asked, recipe.loaders["train"].plan.share(0, 0))
    return {
        "schedule": "gpipe",
        "stages": k,
        "micro_batches": micro_batches,
        "bubble": bubble(timeline(order("gpipe", k, k, micro_batches), k)),
    }


def fit(recipe: Recipe, rehearsed: Rehearsed, capacity: int) -> Plan:
    """Return whether it fits; where not, with how many devices a replica it does, if with any that a node has."""
    if rehearsed.failure:
        return {"fits": None, "smallest_k": None}
    mine = recipe.request.num_devices
    fits = rehearsed.largest <= capacity * (mine if rehearsed.whole else 1)
    return {"fits": fits, "smallest_k": None if fits else smallest_k(recipe, rehearsed, capacity)}


def smallest_k(recipe: Recipe, rehearsed: Rehearsed, capacity: int) -> int | None:
    """Try other numbers of devices, from one on: the first that fits is the smallest."""
    assert recipe.layout is not None
    mine, config = recipe.request.num_devices, recipe.job.config
    state = sum(each.state for each in rehearsed.memory())
    for k in range(1, recipe.layout.gpus + 1):
        if k == mine or state > k * capacity:  # not even in equal parts
            continue
        job = replace(recipe.job, config={**config, "model": {**config["model"], "num_devices": k, "split": None}})
        try:
            other = rehearse(Recipe(job, World(), recipe.control))
        except RequestError:
            continue  # it cannot be cut so, or so many do not go into a node
        if other.failure is None and other.largest <= capacity:
            return k
    return None


def checkpoint_bytes(recipe: Recipe, rehearsed: Rehearsed) -> int:
    """Return the size of a checkpoint: it is written to where only the bytes are counted, with no data in it."""
    run = recipe.make_run(recipe.make_stopper())
    names, steps = [], recipe.total_steps
    if steps is None or steps >= recipe.trainer.log_every_n_steps:
        names = [f"train/{name}" for name in ("loss", "lr", "samples_per_second", "epoch", "grad_norm")]
    if run.val is not None:
        names += [f"val/{name}" for name in ("loss", *recipe.task.metrics)]
    state = gather_state(run) | {
        "model": rehearsed.task.weights(),
        "optimizer": rehearsed.optimizer.state_dict(),
        "metrics": dict.fromkeys(names, 0.0),
        "world_size": recipe.world.world_size,
        "checkpointer": {"values": {"1": 0.0}},
    }
    sink = _Counted()
    with rehearsed.mode, skip_data(materialize_fake_tensors=True):
        torch.save({"format": FORMAT, **state, "digest": "0" * 64}, sink)  # type: ignore[arg-type]
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
        """Nothing is held back."""


def as_text(planned: Plan) -> str:
    """Return the plan as JSON, a line for each rank."""
    ranks = ",\n    ".join(json.dumps(rank) for rank in planned["ranks"])
    return json.dumps({**planned, "ranks": []}, indent=2).replace('"ranks": []', f'"ranks": [\n    {ranks}\n  ]') + "\n"
