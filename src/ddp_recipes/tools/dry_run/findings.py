"""What a plan shows to be wrong, or less than it could be; and what would make a step fit, by running others."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from math import inf
from typing import Any

from ddp_recipes.build.recipe import Recipe, make_recipe
from ddp_recipes.config.parallelism import strategy_settings
from ddp_recipes.devices import HOST
from ddp_recipes.errors import RequestError
from ddp_recipes.reporting.progress import in_bytes
from ddp_recipes.runtime.world import World
from ddp_recipes.strategies.base import batch_norms
from ddp_recipes.tools.dry_run.memory import STATE
from ddp_recipes.tools.dry_run.replica import Replica, run_step, shape_of

Config = Mapping[str, Any]
Sections = Mapping[str, Mapping[str, Any]]
Change = tuple[str, Sections]  # overrides, and keys of sections
Kind = Callable[[Config], Iterable[Change]]  # those that change least first


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
    norms, plan = batch_norms(recipe.task), recipe.loaders["train"].plan
    micro_batches = shape_of(recipe).micro_batches
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


# --- what fits -------------------------------------------------------------------------------------------------------


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
    config, attempt = recipe.job.config, partial(attempt_of, recipe, capacity)
    if (smaller := attempt([]))["peak"] <= capacity:
        return [smaller]
    kinds: list[Kind] = [partial(strategies, 0), recomputed, smaller_batches, partial(strategies, 1)]
    attempts = [(attempt([each]) for each in kind(config)) for kind in kinds]
    first = [next((each for each in of_kind if each["peak"] <= capacity), None) for of_kind in attempts]
    if any(first):
        return [each for each in first if each is not None]
    chosen: list[Change] = []
    least = replica.peak
    for kind in kinds:
        before = list(chosen)
        for each in kind(changed(config, *(sections for _, sections in before))):
            found = attempt([*before, each])
            if found["peak"] < least:  # gradients of batches that are accumulated may take more than these
                chosen, least = [*before, each], found["peak"]
            if found["peak"] <= capacity:
                for other in before:  # it may not be needed beside those that came later
                    fewer = [one for one in chosen if one is not other]
                    if (less := attempt(fewer))["peak"] <= capacity:
                        chosen, found = fewer, less
                return [found]
    return []


def attempt_of(recipe: Recipe, capacity: int, changes: Sequence[Change]) -> dict[str, Any]:
    """Run a step with changes; return overrides and the peak, an infinite one where there is no such step.

    Where its training fits and its validation does not, smaller batches of that are tried.
    """
    config = changed(recipe.job.config, *(sections for _, sections in changes))
    overrides = [each for each, _ in changes]
    if (step := step_of(recipe, config)) is None:
        return {"overrides": "", "peak": inf}
    smaller, size = step, config["data"]["val_batch_size"]
    while smaller.peak > capacity and size > 1 and max(each["training"] for each in step.memory) <= capacity:
        size //= 2
        smaller = step_of(recipe, changed(config, {"data": {"val_batch_size": size}})) or smaller
        if smaller.peak <= capacity:
            return {"overrides": " ".join([*overrides, f"data.val_batch_size={size}"]), "peak": smaller.peak}
    return {"overrides": " ".join(overrides), "peak": step.peak}


def changed(config: Config, *changes: Sections) -> Config:
    """Return a config with other keys of some sections; with a ``_target_`` they are all keys."""
    for sections in changes:
        for name, keys in sections.items():
            config = {**config, name: keys if "_target_" in keys else {**config[name], **keys}}
    return config


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
