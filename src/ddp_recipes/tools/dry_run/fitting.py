"""Whether a step fits a device, and what would make it fit: found by running other ones without data."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from math import inf
from typing import Any

from ddp_recipes.build.recipe import Recipe, make_recipe
from ddp_recipes.config.parallelism import strategy_settings
from ddp_recipes.errors import RequestError
from ddp_recipes.runtime.world import World
from ddp_recipes.tools.dry_run.memory import STATE
from ddp_recipes.tools.dry_run.replica import Replica, run_step, shape_of

Config = Mapping[str, Any]
Sections = Mapping[str, Mapping[str, Any]]
Change = tuple[str, Sections]  # overrides, and keys of sections
Kind = Callable[[Config], Iterable[Change]]  # those that change least first


def fit(recipe: Recipe, replica: Replica, capacity: int) -> dict[str, Any]:
    """Return whether it fits; where not, with how many devices or stages a replica, and with what else, it does."""
    smallest = "smallest_k" if recipe.request.strategy.pipeline is None else "smallest_stages"
    found: dict[str, Any] = {"fits": None, smallest: None, "would_fit": []}
    if replica.failure:
        return found
    there = capacity * (recipe.request.num_devices if replica.whole else 1)
    found["fits"] = replica.peak <= there
    if not found["fits"]:
        found[smallest] = smallest_that_fits(recipe, replica, capacity)
        found["would_fit"] = what_would_fit(recipe, replica, there)
    return found


def smallest_that_fits(recipe: Recipe, replica: Replica, capacity: int) -> int | None:
    """Try other numbers of devices, from one on, or of stages: the first that fits is the smallest."""
    layout, shape = recipe.devices.layout, shape_of(recipe)
    assert layout is not None
    most = layout.gpus
    if recipe.request.strategy.pipeline is not None:
        most = layout.nnodes * max(layout.gpus, 1) * shape.each
    section, key = shape.stages_key.split(".")
    state = sum(each[name] for each in replica.memory for name in STATE)
    for number in range(1, most + 1):
        if number == shape.stages or state > number // shape.each * capacity:  # not even in equal parts
            continue
        anew = changed(changed(recipe.job.config, {"model": {"split": None}}), {section: {key: number}})
        if (other := step_of(recipe, anew)) is not None and other.peak <= capacity:
            return number
    return None


def step_of(recipe: Recipe, config: Config) -> Replica | None:
    """Run a step with another config; return ``None`` where that cannot be, or shows nothing."""
    try:
        replica = run_step(make_recipe(replace(recipe.job, config=config), World(), recipe.control))
    except RequestError:  # such as a model that cannot be cut so
        return None
    return None if replica.failure else replica


def what_would_fit(recipe: Recipe, replica: Replica, capacity: int) -> list[dict[str, Any]]:
    """Return overrides that make it fit, each with the peak: the first of each kind, or else several together."""

    def run(changes: Sequence[Change]) -> tuple[float, list[dict[str, Any]]]:
        """Return the peak with changes, and what of them fits."""
        config = changed(recipe.job.config, *(sections for _, sections in changes))
        other = step_of(recipe, config)
        given = " ".join(overrides for overrides, _ in changes)
        return (inf, []) if other is None else (other.peak, with_validation(recipe, given, config, other, capacity))

    if alone := with_validation(recipe, "", recipe.job.config, replica, capacity):
        return alone
    kinds: list[Kind] = [partial(strategies, 0), recomputed, smaller_batches, partial(strategies, 1)]
    fit = [next((found for each in kind(recipe.job.config) if (found := run([each])[1])), []) for kind in kinds]
    if any(fit):
        return [found for of_kind in fit for found in of_kind]
    chosen: list[Change] = []
    least: float = replica.peak
    for kind in kinds:
        before = list(chosen)
        for each in kind(changed(recipe.job.config, *(sections for _, sections in before))):
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


def changed(config: Config, *changes: Sections) -> Config:
    """Return a config with other keys of some sections; with a ``_target_`` they are all keys."""
    for sections in changes:
        for name, keys in sections.items():
            config = {**config, name: keys if "_target_" in keys else {**config[name], **keys}}
    return config


def with_validation(
    recipe: Recipe, overrides: str, config: Config, replica: Replica, capacity: int
) -> list[dict[str, Any]]:
    """Return the overrides if a step of them fits, with smaller batches of validation where those are too large."""
    size, alone = config["data"]["val_batch_size"], overrides
    while replica.peak > capacity and size > 1 and max(each["training"] for each in replica.memory) <= capacity:
        size //= 2
        overrides = f"{alone} data.val_batch_size={size}".strip()
        replica = step_of(recipe, changed(config, {"data": {"val_batch_size": size}})) or replica
    return [{"overrides": overrides, "peak": replica.peak}] if overrides and replica.peak <= capacity else []


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
