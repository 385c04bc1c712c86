"""Whether a step fits a device, and what would make it fit: found by running other ones without data."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ddp_recipes.build.optimizer import make_optimizer
from ddp_recipes.build.recipe import Recipe, make_recipe
from ddp_recipes.errors import RequestError
from ddp_recipes.runtime.world import World
from ddp_recipes.tools.dry_run.memory import Batches, ReplicaStep
from ddp_recipes.tools.dry_run.pipeline import PipelineSteps

Config = Mapping[str, Any]
Changes = Iterator[tuple[str, Config]]  # overrides, and the config with them; those that change least first


def fit(recipe: Recipe, step: ReplicaStep | PipelineSteps, capacity: int) -> dict[str, Any]:
    """Return whether it fits; where not, with how many devices or stages a replica, and with what else, it does."""
    smallest = "smallest_k" if recipe.request.strategy.pipeline is None else "smallest_stages"
    if step.failure:
        return {"fits": None, smallest: None, "would_fit": []}
    there = capacity * (recipe.request.num_devices if step.whole else 1)
    if largest(step) <= there:
        return {"fits": True, smallest: None, "would_fit": []}
    number = smallest_that_fits(recipe, step, capacity)
    return {"fits": False, smallest: number, "would_fit": what_would_fit(recipe, step, there)}


def largest(step: ReplicaStep | PipelineSteps) -> int:
    """Return the peak of the fullest device."""
    return max(each.peak for each in step.memory())


def smallest_that_fits(recipe: Recipe, step: ReplicaStep | PipelineSteps, capacity: int) -> int | None:
    """Try other numbers of devices, from one on, or of stages: the first that fits is the smallest."""
    layout = recipe.devices.layout
    assert layout is not None
    config, pipeline, gpus = recipe.job.config, recipe.request.strategy.pipeline, layout.gpus
    section, key, mine, most = "model", "num_devices", recipe.request.num_devices, gpus
    if pipeline is not None:
        section, key = pipeline.stages_key.split(".")
        mine = pipeline.stages
        most = layout.nnodes * max(gpus, 1) * pipeline.each
    state = sum(each.state for each in step.memory())
    for number in range(1, most + 1):
        devices = number if pipeline is None else number // pipeline.each
        if number == mine or state > devices * capacity:  # not even in equal parts
            continue
        changed = {**config, "model": {**config["model"], "split": None}}
        changed[section] = {**changed[section], key: number}
        other = step_of(recipe, changed)
        if other is not None and largest(other) <= capacity:
            return number
    return None


def step_of(recipe: Recipe, config: Config) -> ReplicaStep | PipelineSteps | None:
    """Run a step with another config; return ``None`` where that cannot be, or shows nothing."""
    try:
        step = run_step(make_recipe(replace(recipe.job, config=config), World(), recipe.control))
    except RequestError:  # such as a model that cannot be cut so
        return None
    return None if step.failure else step


def what_would_fit(recipe: Recipe, step: ReplicaStep | PipelineSteps, capacity: int) -> list[dict[str, Any]]:
    """Return overrides that make it fit, each with the peak: the first of each kind, or else several together."""
    config, given = recipe.job.config, ""
    found = with_validation(recipe, given, config, step, capacity)
    for together in (False, True):
        for kind in (strategies, recomputed, smaller_batches) if not found else ():
            possible = None
            for overrides, changed in kind(recipe, config):
                if (other := step_of(recipe, changed)) is not None:
                    possible = f"{given}{overrides}", changed
                    if fits := with_validation(recipe, *possible, other, capacity):
                        found += fits
                        break
            if together and possible is not None:
                if found:
                    break
                given, config = f"{possible[0]} ", possible[1]
    return found


def with_validation(
    recipe: Recipe, overrides: str, config: Config, step: ReplicaStep | PipelineSteps, capacity: int
) -> list[dict[str, Any]]:
    """Return the overrides if a step of them fits, with smaller batches of validation where those are too large."""
    size, alone = config["data"]["val_batch_size"], overrides
    while largest(step) > capacity and size > 1 and max(each.training for each in step.memory()) <= capacity:
        size //= 2
        overrides = f"{alone} data.val_batch_size={size}".strip()
        step = step_of(recipe, {**config, "data": {**config["data"], "val_batch_size": size}}) or step
    return [{"overrides": overrides, "peak": largest(step)}] if overrides and largest(step) <= capacity else []


def strategies(recipe: Recipe, config: Config) -> Changes:
    """Yield what the strategy's settings know to take less."""
    for overrides, keys in recipe.request.strategy.with_less_memory().items():
        yield overrides, {**config, "strategy": keys if "_target_" in keys else {**config["strategy"], **keys}}


def recomputed(recipe: Recipe, config: Config) -> Changes:
    """Yield that activations are computed again."""
    if not recipe.request.model.activation_checkpointing:
        key = "activation_checkpointing"
        yield f"model.{key}=true", {**config, "model": {**config["model"], key: True}}


def smaller_batches(recipe: Recipe, config: Config) -> Changes:
    """Yield smaller batches, more of them a step."""
    data, trainer = config["data"], config["trainer"]
    key = "batch_size" if data["global_batch_size"] is None else "global_batch_size"
    for parts in (each for each in range(2, data[key] + 1) if data[key] % each == 0):
        size, times = data[key] // parts, trainer["accumulate_grad_batches"] * parts
        changed = {"data": {**data, key: size}, "trainer": {**trainer, "accumulate_grad_batches": times}}
        yield f"data.{key}={size} trainer.accumulate_grad_batches={times}", {**config, **changed}


def run_step(recipe: Recipe) -> ReplicaStep | PipelineSteps:
    """Run a step of the recipe without data, on the devices of one replica.

    A model that places itself knows no devices but those it was made for, and the CPU has one memory for each process:
    then all that a process has is on one device.
    """
    train = recipe.loaders["train"]
    batches = Batches(
        (train.sample(), train.plan.size(0, 0)),
        [(val.sample(), val.plan.size(0, 0)) for val in recipe.val.values()],
        min(recipe.trainer.accumulate_grad_batches, len(train)),
    )
    starts = [stage.first for stage in recipe.stages[1:]]
    on_cpu = recipe.devices.type == "cpu"
    if (pipeline := recipe.request.strategy.pipeline) is not None:
        return PipelineSteps(
            recipe.task,
            starts,
            torch.device("cpu") if on_cpu else torch.device("cuda", 0),
            pipeline,
            recipe.world,
            partial(make_optimizer, recipe.job.config, may_fuse=recipe.may_fuse),
            batches,
            recipe.trainer.precision,
        )
    devices = [torch.device("cuda", number) for number in range(len(starts) + 1)]
    whole = on_cpu or (recipe.request.num_devices > 1 and not starts)
    if whole:
        starts, devices = [], [torch.device("cpu")]
    return ReplicaStep(
        recipe.task,
        starts,
        devices,
        recipe.strategy,
        recipe.world,
        partial(make_optimizer, recipe.job.config, may_fuse=recipe.may_fuse),
        batches,
        recipe.trainer.precision,
        whole=whole and recipe.request.num_devices > 1,
    )
