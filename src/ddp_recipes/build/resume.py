"""How a run goes on from a checkpoint, which is checked against the run."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddp_recipes._compat.torch_ import laid_out_as, schedulers_in
from ddp_recipes.checkpointing.files import State, find
from ddp_recipes.checkpointing.manager import values_of
from ddp_recipes.checkpointing.reading import check_weights, is_alike, load_first
from ddp_recipes.config.request import Request
from ddp_recipes.data.loader import Loader
from ddp_recipes.errors import RequestError
from ddp_recipes.runtime.control import Control
from ddp_recipes.strategies.base import parameters_in
from ddp_recipes.tasks import Task
from ddp_recipes.tasks.task import outside
from ddp_recipes.training.cadence import Cursor
from ddp_recipes.training.state import Run, classes_of, kinds_of


def resumed(
    paths: Sequence[Path], request: Request, directory: Path, task: Task, train: Loader | None, control: Control
) -> tuple[Path, State, Sequence[str]]:
    """Return path and state of the first of these checkpoints that is whole, and warnings.

    Raises:
        RequestError: names or shapes are not those of the task's weights, or it does not go on in this run.
    """
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
    return path, state, warnings


def _shaped(task: Task, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the task's weights; of those that take the shape of what they load, as torch's observers do, the saved."""
    weights = task.weights()
    for full in task.state_dict():
        name = outside(full)
        if name in saved and not is_alike(saved[name], weights[name]) and takes(task, full, saved[name]):
            weights[name] = saved[name]
    return weights


def takes(task: Task, name: str, value: Any) -> bool:
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


# --- the state of a run that is made

_KERNELS = ("fused", "foreach")  # options of an optimizer that are this run's own, whatever the checkpoint's were


def restore(run: Run, state: State, goes_on: bool = True) -> list[str]:
    """Restore a saved state, whose weights the task has already; return warnings of what it replaces.

    Args:
        goes_on: whether it is this very run's, which callbacks may have ended already. Another one is not over for it.

    Raises:
        RequestError: the state is of another class of optimizer.
    """
    warnings = _restore_callbacks(run, state, goes_on)
    run.task.restore(state)  # first: a module or callback may give an optimizer the groups that it had
    optimizers = [state["optimizer"], *state.get("more_optimizers", [])]
    schedulers = [state["scheduler"], *state.get("more_schedulers", [])]
    groups = [group for optimizer in run.optimizers for group in optimizer.param_groups]
    saved_groups = [group for optimizer in optimizers for group in optimizer["param_groups"]]
    for kind, mine, its in (
        ("optimizer", classes_of(run.optimizers), state.get("optimizer_class")),
        ("scheduler", kinds_of(run.schedules), state.get("schedule")),
        ("parameter groups", _described(groups), _described(saved_groups)),
        ("parameter", *_first_other(_members(groups), _members(saved_groups))),
    ):
        if its not in (None, mine):
            raise RequestError(
                f"The checkpoint was trained with the {kind} {its}, this run has {mine}, which cannot restore its "
                f"state. Choose the checkpoint's, or start afresh with its weights: weights_from in place of ckpt_path."
            )
    warnings += _replaced(groups, saved_groups)
    converted = _is_converted(run, state["model"])
    for optimizer, saved in zip(run.optimizers, optimizers, strict=True):
        kernels = [{key: group[key] for key in _KERNELS if key in group} for group in optimizer.param_groups]
        of_groups = [{**each, **own} for each, own in zip(saved["param_groups"], kernels, strict=True)]
        # Before it is loaded: by these torch decides where a count of steps lies (pytorch #104767).
        run.strategy.load_optimizer_state(optimizer, {**saved, "param_groups": of_groups})
        _settle(optimizer, saved["state"], converted)
    for schedule, saved in zip(run.schedules, schedulers, strict=True):
        warnings += _rescheduled(schedule.scheduler, saved)
        schedule.scheduler.load_state_dict(saved)
    run.precision.load_state(state["precision"])
    run.cursor = Cursor(**state["cursor"])
    run.train.load_state(state.get("data"), run.cursor.epoch, run.cursor.batch)
    run.train.skipped.update(state.get("skipped", []))
    if state.get("unfinished") is not None:
        run.unfinished = Cursor(**state["unfinished"])
    drawn = state.get("drawn", [])
    run.generators.drawn |= bool(drawn[run.world.rank] if len(drawn) == run.world.world_size else any(drawn))
    run.samples_before = run.cursor.samples_seen
    for name, trains in state.get("switched", {}).items():
        run.task.get_parameter(name).requires_grad_(trains)
    run.metrics.update(state["metrics"])
    run.values.update(values_of(state.get("checkpointer", {}), run.checkpoint.monitor))
    if run.auto_monitor and run.values and run.monitor not in run.metrics:
        run.monitor = "train/loss"  # which those values are of
    run.saved_step = run.good_step = run.cursor.step
    return warnings


def _restore_callbacks(run: Run, state: State, goes_on: bool) -> list[str]:
    """Restore the callbacks; return warnings of those that are no more."""
    saved = state["callbacks"]
    if not isinstance(saved, Mapping):  # until 0.1 they came in their order
        saved = dict(zip(run.callbacks, saved, strict=False))
    for name in state.get("stops", []) if goes_on else []:
        run.callbacks[name].stop = True
    for name in saved:
        if name in run.callbacks:
            run.callbacks[name].load_state(saved[name])
    return [
        f"callbacks.{name} is not in this run: what the checkpoint has of it is not taken."
        for name, content in saved.items()
        if content and name not in run.callbacks
    ]


def _is_converted(run: Run, saved: Mapping[str, Any]) -> bool:
    """Whether some weights came in another dtype than they have in this run, and with them what an optimizer has."""
    mine = {name: getattr(value, "dtype", None) for name, value in run.task.weights().items()}
    return any(getattr(value, "dtype", mine.get(name)) != mine.get(name) for name, value in saved.items())


def _settle(optimizer: torch.optim.Optimizer, saved: Mapping[Any, Any], converted: bool) -> None:
    """Leave what an optimizer has of each parameter as it was saved, and laid out as the parameter is.

    torch gives all of it the parameter's dtype: averages in 32 bits of weights in 16, masks, whole numbers.
    """
    by_torch = type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict
    for number, parameter in enumerate(parameters_in(optimizer)):
        of_one = optimizer.state.get(parameter)
        if not isinstance(of_one, dict):
            continue
        if by_torch and not converted and number in saved:
            its = {name: value for name, value in saved[number].items() if name != "step" and name in of_one}
            of_one.update({name: _as_saved(of_one[name], value) for name, value in its.items()})
        alike = {name: each for name, each in of_one.items() if getattr(each, "shape", None) == parameter.shape}
        of_one.update({name: laid_out_as(each, parameter) for name, each in alike.items()})


def _as_saved(loaded: Any, saved: Any) -> Any:
    """Return a value that torch has loaded in the dtype that it was saved with; it takes texts apart as well."""
    if isinstance(saved, Tensor) and isinstance(loaded, Tensor):
        same = loaded.dtype == saved.dtype or loaded.shape != saved.shape  # or these are a rank's rows of it
        return loaded if same else saved.to(loaded.device)
    if isinstance(saved, dict):
        return {name: _as_saved(loaded[name], value) for name, value in saved.items()}
    if isinstance(saved, (list, tuple)):
        return type(saved)(map(_as_saved, loaded, saved))
    return saved if isinstance(saved, str) else loaded


def _described(groups: Sequence[Mapping[str, Any]]) -> str:
    """Return the parameter groups with their sizes, in words."""
    named = [f"{group.get('name', number)} ({len(group['params'])})" for number, group in enumerate(groups)]
    return ", ".join(named[:8]) + (f", … ({len(named)} in all)" if len(named) > 8 else "")


def _members(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return each parameter with its group, in words; none where their names are not known."""
    return [
        f"{name} in {group['name']}" for group in groups for name in group.get("param_names", ()) if "name" in group
    ]


def _first_other(mine: Sequence[str], its: Sequence[str]) -> tuple[str, str]:
    """Return the first two that differ, or two alike."""
    return next(((one, other) for one, other in zip(mine, its, strict=False) if one != other), ("", ""))


def _rescheduled(scheduler: Any, saved: Mapping[str, Any], place: str = "scheduler") -> list[str]:
    """Return what the scheduler, or one that it is made of, asks for and does not get: the checkpoint's goes on."""
    found = [
        f"{place}.{name}={now} is not taken: the run resumes with the checkpoint's {saved[name]}."
        for name, now in scheduler.state_dict().items()
        if name in signature(type(scheduler)).parameters and name in saved and saved[name] != now
        if isinstance(now, (bool, int, float, str)) and name != "last_epoch"
    ]
    for number, (each, its) in enumerate(schedulers_in(scheduler, saved)):
        found += _rescheduled(each, its, f"{place}.schedulers.{number}")
    return found


def _replaced(groups: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what each group of parameters asks for and does not get, for the checkpoint's optimizer goes on."""
    found = []
    for number, (now, was) in enumerate(zip(groups, saved, strict=False)):
        scheduled = {"lr"} if "initial_lr" in was else set()
        if "max_momentum" in was:
            scheduled |= {"momentum", "betas"}
        names = [name for name in now if name in was and name not in {"params", *_KERNELS, *scheduled}]
        changed = {name.removeprefix("initial_"): (now[name], was[name]) for name in names if now[name] != was[name]}
        of_group = f" of parameter group {number}" if len(groups) > 1 else ""
        found += [
            f"optimizer.{name}={mine}{of_group} is not taken: the run resumes with the checkpoint's {its}."
            for name, (mine, its) in changed.items()
        ]
    return found
