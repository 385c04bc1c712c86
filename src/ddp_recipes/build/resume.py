"""What a run starts from, checked against the run."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddp_recipes.checkpointing.files import State, check_weights, find, is_alike, load_first
from ddp_recipes.config.extras import extra
from ddp_recipes.config.request import Request
from ddp_recipes.data.loader import Loader
from ddp_recipes.errors import RequestError
from ddp_recipes.runtime.control import Control
from ddp_recipes.runtime.job import Job
from ddp_recipes.tasks import Task
from ddp_recipes.tasks.task import outside


@dataclass(frozen=True)
class Start:
    """What a run starts from: a checkpoint, weights alone, or, with neither, what the model was made with."""

    path: Path | None = None
    state: State | None = None
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    warnings: Sequence[str] = ()


def start_of(job: Job, request: Request, task: Task, train: Loader | None, control: Control) -> Start:
    """Return what the run starts from, where it does not take the place of a lost rank: then the others have the state.

    Args:
        train: the loader that goes on from a state's cursor; ``None`` where nothing is trained.
        control: shares the work of verification among ranks.

    Raises:
        RequestError: there is no such file, it cannot be read, or it is of another model or of other batches.
    """
    if job.regroup is not None:
        return Start()
    directory, mode, weights_from = job.directory, request.run.mode, request.run.weights_from
    if paths := find(request.run.ckpt_path, directory):
        return _resumed(paths, request, directory, task, train, control)
    if weights_from is not None:
        full = {outside(name): name for name in task.state_dict()}
        weights, warnings = extra("weights_from")(
            weights_from, task.weights(), lambda name, value: _takes(task, full[name], value)
        )
        return Start(weights=weights, warnings=warnings)
    if mode == "export":
        raise RequestError(f"mode=export: {directory} has no checkpoint. Give a run directory or a file as ckpt_path.")
    if mode == "fit":
        return Start()
    return Start(warnings=[f"mode={mode} without ckpt_path: the weights are the model's initial ones."])


def _resumed(
    paths: Sequence[Path],
    request: Request,
    directory: Path,
    task: Task,
    train: Loader | None,
    control: Control,
) -> Start:
    """Return the first of these checkpoints that is whole; its names and shapes must be those of the task's weights."""
    readers = control.world.world_size if train is not None else 0
    try:
        path, state, warnings = load_first(paths, control.shared, readers)
    except RequestError:
        if (newer := find(request.run.ckpt_path, directory)) == paths:
            raise
        # A run that goes on there has deleted what was the newest.
        path, state, warnings = load_first(newer, control.shared, readers)
    weights = _shaped(task, state["model"])
    check_weights(path, state["model"], weights)
    if train is not None:
        converted = _converted(path, state["model"], weights)
        warnings = [*warnings, *fit_cursor(path, state, request, train), *converted]
    return Start(path, state, warnings=warnings)


def _shaped(task: Task, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the task's weights; of those that take the shape of what they load, as torch's observers do, the saved."""
    weights = task.weights()
    for full in task.state_dict():
        name = outside(full)
        if name in saved and not is_alike(saved[name], weights[name]) and _takes(task, full, saved[name]):
            weights[name] = saved[name]
    return weights


def _takes(task: Task, name: str, value: Any) -> bool:
    """Whether the module that has a tensor would load it in another shape; a copy of it is tried out."""
    owner, _, key = name.rpartition(".")
    if not hasattr(value, "shape"):
        return False
    trial = deepcopy(task.get_submodule(owner))
    with suppress(RuntimeError):  # of two shapes
        trial.load_state_dict({key: torch.empty(value.shape, dtype=value.dtype)}, strict=False)
    return is_alike(value, trial.state_dict()[key])


def _converted(path: Path, saved: Mapping[str, Any], weights: Mapping[str, Any]) -> list[str]:
    """Return a line on weights that come from the checkpoint in another dtype than the model has."""
    pairs = ((name, getattr(saved[name], "dtype", None), getattr(weights[name], "dtype", None)) for name in weights)
    for name, its, mine in pairs:
        if its != mine:
            return [
                f"{path} has {name} in {its}, and in this run it is of {mine}: weights are converted, and go on with "
                f"other bits than there (trainer.precision)."
            ]
    return []


def _in_another_order(path: Path | str, state: State, request: Request, train: Loader) -> Iterator[str]:
    """Yield a warning where the epoch that a checkpoint is in the midst of has its samples in another order here."""
    cursor, seed = state["cursor"], request.run.seed
    now = train.plan.first(cursor["epoch"])
    if state.get("first_samples", now) == now:
        return
    why = f"seed={seed}, where that was {state['seed']}" if state["seed"] != seed else "other data, or another order"
    yield (
        f"{path} is from after {cursor['batch']} batches of epoch {cursor['epoch']}, whose samples come in another "
        f"order in this run ({why}): until it ends some are seen twice, and some not at all."
    )


def fit_cursor(path: Path | str, state: State, request: Request, train: Loader) -> list[str]:
    """See that this run's batches go on where those of the checkpoint ended; refuse, or begin a little earlier."""
    cursor, was, now = state["cursor"], state["global_batch_size"], train.plan.global_batch_size
    done = cursor["batch"]
    train.check_state(path, state.get("data"), request.resume.strict)
    if request.resume.strict:
        request.strategy.check_resume(path, state.get("shards"))
    samples, had = train.plan.num_samples, state.get("num_samples", train.plan.num_samples)
    others = done > 0 and samples != had  # in the middle of an epoch, whose order is another one
    if was == now and done < len(train) and not others:
        return [*_in_another_order(path, state, request, train)] if done else []
    if request.resume.strict:
        differs, remedy = (
            f"was trained with a global batch of {was} samples, this run has {now}",
            f"data.global_batch_size={was}",
        )
        if was == now and others:
            differs = f"is from after batch {done} of an epoch of {had:,} samples, this run has {samples:,}"
            remedy = "the data as they were"
        elif was == now:
            differs = f"is from after batch {done} of an epoch, this run has {len(train)} batches an epoch"
            remedy = "the limits of trainer.* and the data as they were"
        raise RequestError(
            f"{path} {differs}: it would not go on where that one stopped. Set {remedy}, or resume.strict=false to "
            f"go on as nearly as can be, or start afresh without ckpt_path."
        )
    cursor["batch"] = at = min(done * was // now, len(train) - 1)
    again = min(done * was, len(train) * now) - at * now
    seen = f"{again} are seen twice, none is left out"
    if others:
        seen = f"there are {samples:,} in another order, and were {had:,}, so that some are seen twice"
    return [
        f"{path} is from after {done} batches of {was} samples. Epoch {cursor['epoch']} goes on at batch {at} of "
        f"{now} samples: {seen}. The schedule is the checkpoint's."
    ]
