"""Whether a step fits a device, and what would make it fit: found by running other ones without data."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from math import inf
from typing import Any

import torch

from ddp_recipes.build.recipe import Recipe, make_recipe
from ddp_recipes.build.run import make_optimizer
from ddp_recipes.config.parallelism import strategy_settings
from ddp_recipes.devices import HOST, fake_devices
from ddp_recipes.errors import RequestError
from ddp_recipes.runtime.world import World
from ddp_recipes.tools.dry_run.memory import Batches, ReplicaStep
from ddp_recipes.tools.dry_run.simulation import PipelineSteps

Config = Mapping[str, Any]
Change = tuple[str, Mapping[str, Mapping[str, Any]]]  # overrides, and keys of sections
Kind = Callable[[Config], Iterable[Change]]  # those that change least first


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
        other = step_of(recipe, changed(config, [("", {"model": {"split": None}}), ("", {section: {key: number}})]))
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

    def run(changes: Sequence[Change]) -> tuple[float, list[dict[str, Any]]]:
        """Return the peak with changes, and what of them fits."""
        config = changed(recipe.job.config, changes)
        other = step_of(recipe, config)
        given = " ".join(overrides for overrides, _ in changes)
        return (inf, []) if other is None else (largest(other), with_validation(recipe, given, config, other, capacity))

    if alone := with_validation(recipe, "", recipe.job.config, step, capacity):
        return alone
    kinds: list[Kind] = [partial(strategies, 0), recomputed, smaller_batches, partial(strategies, 1)]
    fit = [next((found for each in kind(recipe.job.config) if (found := run([each])[1])), []) for kind in kinds]
    if any(fit):
        return [found for of_kind in fit for found in of_kind]
    chosen: list[Change] = []
    least: float = largest(step)
    for kind in kinds:
        before = list(chosen)
        for each in kind(changed(recipe.job.config, before)):
            peak, found = run([*before, each])
            if found or peak < least:  # gradients of batches that are accumulated may take more than these
                chosen, least = [*before, each], peak
            if found:
                for other in before:  # it may not be needed beside those that came later
                    fewer = [one for one in chosen if one is not other]
                    if less := run(fewer)[1]:
                        chosen, found = fewer, less
                return found
    return []


def changed(config: Config, changes: Sequence[Change]) -> Config:
    """Return a config with other keys of some sections; with a ``_target_`` they are all keys."""
    for _, sections in changes:
        for name, keys in sections.items():
            config = {**config, name: keys if "_target_" in keys else {**config[name], **keys}}
    return config


def with_validation(
    recipe: Recipe, overrides: str, config: Config, step: ReplicaStep | PipelineSteps, capacity: int
) -> list[dict[str, Any]]:
    """Return the overrides if a step of them fits, with smaller batches of validation where those are too large."""
    size, alone = config["data"]["val_batch_size"], overrides
    while largest(step) > capacity and size > 1 and max(each.training for each in step.memory()) <= capacity:
        size //= 2
        overrides = f"{alone} data.val_batch_size={size}".strip()
        step = step_of(recipe, changed(config, [("", {"data": {"val_batch_size": size}})])) or step
    return [{"overrides": overrides, "peak": largest(step)}] if overrides and largest(step) <= capacity else []


def strategies(kind: int, config: Config) -> Iterator[Change]:
    """Yield what the strategy's settings know to take less, of the strategies that are installed."""
    for choices in strategy_settings(config["strategy"]).with_less_memory()[kind : kind + 1]:
        for overrides, keys in choices.items():
            if "_target_" not in keys or find_spec(keys["_target_"].rpartition(".")[0]) is not None:
                yield overrides, {"strategy": keys}


def recomputed(config: Config) -> Iterator[Change]:
    """Yield that activations are computed again."""
    if not config["model"].get("activation_checkpointing"):
        yield "model.activation_checkpointing=true", {"model": {"activation_checkpointing": True}}


def smaller_batches(config: Config) -> Iterator[Change]:
    """Yield smaller batches, more of them a step."""
    key = "batch_size" if config["data"]["global_batch_size"] is None else "global_batch_size"
    whole, accumulate = config["data"][key], config["trainer"]["accumulate_grad_batches"]
    for parts in (each for each in range(2, whole + 1) if whole % each == 0):
        size, times = whole // parts, accumulate * parts
        overrides = f"data.{key}={size} trainer.accumulate_grad_batches={times}"
        yield overrides, {"data": {key: size}, "trainer": {"accumulate_grad_batches": times}}


def run_step(recipe: Recipe) -> ReplicaStep | PipelineSteps:
    """Run a step of the recipe without data, on the devices of one replica.

    A model that places itself knows no devices but those it was made for, and the CPU has one memory for each process:
    then all that a process has is on one device.
    """
    train = recipe.loaders["train"]
    batches = Batches(
        train.sample(train.plan.size(0, 0)),
        [val.sample(val.plan.size(0, 0)) for val in recipe.val.values()],
        min(recipe.trainer.accumulate_grad_batches, len(train)),
    )
    starts = [stage.first for stage in recipe.built.stages[1:]]
    on_cpu = recipe.devices.type == HOST
    if (pipeline := recipe.request.strategy.pipeline) is not None:
        return PipelineSteps(
            recipe.task,
            starts,
            torch.device(HOST) if on_cpu else fake_devices(1)[0],
            pipeline,
            recipe.world,
            partial(make_optimizer, recipe.job.config, may_fuse=recipe.may_fuse),
            batches,
            recipe.trainer.precision,
        )
    devices = fake_devices(len(starts) + 1)
    whole = on_cpu or (recipe.request.num_devices > 1 and not starts)
    if whole:
        starts, devices = [], [torch.device(HOST)]
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
