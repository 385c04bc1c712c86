"""What the loop works with, what of it a checkpoint holds, and how that is saved and restored."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddp_recipes._compat.torch_ import laid_out_as, local, schedulers_in
from ddp_recipes.callbacks import Callback
from ddp_recipes.checkpointing.files import State
from ddp_recipes.checkpointing.manager import Checkpointer, values_of
from ddp_recipes.config.settings import CheckpointSettings, TrainerSettings, check_measured
from ddp_recipes.data.loader import Batch, Loader, skipped_of
from ddp_recipes.errors import RequestError
from ddp_recipes.loggers import Logger
from ddp_recipes.reporting.progress import Progress
from ddp_recipes.runtime.seeding import Generators
from ddp_recipes.runtime.world import World
from ddp_recipes.strategies import Strategy
from ddp_recipes.strategies.base import Wrapped, by_rank, parameters_in
from ddp_recipes.tasks import Schedule, Task
from ddp_recipes.training.cadence import Cursor, StopController
from ddp_recipes.training.clock import Clock, Flops
from ddp_recipes.training.guards import Losses, NonFiniteGuard
from ddp_recipes.training.hooks import RunHooks
from ddp_recipes.training.precision import Precision

Metrics = dict[str, float]

_KERNELS = (
    "fused",
    "foreach",
)  # options of an optimizer that are this run's own, whatever the checkpoint was made with


class Update(NamedTuple):
    """What an optimizer step came to.

    Attributes:
        losses: of each of this rank's shards, on their devices; empty where the task has none to show.
        samples: of all ranks.
        norm: of the gradient before it was clipped, if it was measured.
        lr: of the first parameter group, as the step took it.
        loss: mean over the samples of all ranks, if it was measured.
        metrics: of the batch, over the samples of all ranks; empty where they are not measured.
    """

    losses: Sequence[Losses]
    samples: int
    norm: Tensor | None
    lr: float | Tensor
    loss: Tensor | None = None
    metrics: Mapping[str, float] = {}


@dataclass
class Run:
    """All that the loop works with; ``build/`` makes it from the config."""

    world: World
    task: Task
    module: Wrapped
    update: "Callable[[Run, Iterator[Batch], bool], Update]"  # takes an optimizer step
    strategy: Strategy
    devices: Sequence[torch.device]
    optimizers: Sequence[torch.optim.Optimizer]  # one, unless the task steps them itself
    schedules: Sequence[Schedule]
    precision: Precision
    train: Loader
    val: Mapping[str, Loader]  # by what its metrics' names begin with: val, or val/<name> where there are several
    trainer: TrainerSettings
    checkpoint: CheckpointSettings
    monitor: str
    auto_monitor: bool  # whether that is the loss by itself, not by the config
    seed: int
    generators: Generators
    shards: int | None  # of a batch, where the strategy fixes their number
    stop_controller: StopController
    guard: NonFiniteGuard
    clock: Clock
    flops: Flops | None = None  # where they are asked for
    logger: Logger = field(default_factory=Logger)
    progress: Progress = field(default_factory=Progress)
    checkpointer: Checkpointer = field(default_factory=Checkpointer)
    callbacks: Mapping[str, Callback] = field(default_factory=dict)  # by their names in the config
    cursor: Cursor = Cursor()  # noqa: RUF009 (a tuple)
    unfinished: Cursor | None = None  # where the last step began, if what follows a step is still to be done
    metrics: Metrics = field(default_factory=dict)  # the latest of each
    samples_before: int = 0  # seen by earlier starts
    began: float = field(default_factory=time.monotonic)
    together: bool = False  # whether no rank may change weights before all can: others have other parts of the model
    hooks: Sequence[RunHooks] = ()  # of extras, around each step
    replaced: int = 0  # ranks that were lost, in all starts
    seconds_lost: float = 0.0  # by that
    unsaved: bool = False  # whether a checkpoint that is due after the last step is still to be written
    measured: bool = False  # whether the monitored metric belongs to the last step
    values: dict[str, float] = field(default_factory=dict)  # of the monitored metric, by the step of a checkpoint
    reason: str = ""  # why it ended, once it has: what `loop.fit` returns
    saved_step: int = -1
    good_step: int = -1  # the same, where checkpoints are written
    note: Callable[[], None] = lambda: None  # writes how far it came: nobody may be left to write it later

    def __post_init__(self) -> None:
        """Note which parameters are trained at first."""
        self._trained = {name: parameter.requires_grad for name, parameter in self.task.named_parameters()}

    @property
    def stops(self) -> list[str]:
        """The callbacks that have ended the run."""
        return [name for name, callback in self.callbacks.items() if callback.stop]

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The only one, or the first."""
        return self.optimizers[0]

    def switched(self) -> dict[str, bool]:
        """Return of the parameters that were frozen or unfrozen since whether they are trained now."""
        now = {name: parameter.requires_grad for name, parameter in self.task.named_parameters()}
        return {name: trains for name, trains in now.items() if trains != self._trained.get(name, trains)}


def gather_state(run: Run) -> State:
    """Return all that a resume needs: weights, optimizer, scheduler, scaler, callbacks and the cursor. A collective."""
    run.generators.check()
    drawn = torch.tensor(int(run.generators.drawn), device=run.devices[0])
    every = by_rank(drawn, run.world, run.strategy.sum).tolist()
    weights = run.strategy.saved_weights(run.task)
    optimizers = [run.strategy.optimizer_state(optimizer) for optimizer in run.optimizers]
    return _state(run, every, weights, optimizers, run.train.state(run.strategy.gather)) | _skipped(run)


def _skipped(run: Run) -> State:
    """Return which samples were left out on any rank, where some may be; a collective then."""
    loaders = [run.train, *run.val.values()]
    if not any(loader.may_skip for loader in loaders):
        return {}
    every = run.strategy.gather(skipped_of(loaders))
    return {"skipped": sorted(set().union(*(every or [])))}


def saved_state(run: Run) -> State:
    """Return of all that what this rank saves, where each saves what it has: ``ModelLayout.writers``. No collective."""
    weights = run.strategy.saved_weights(run.task)
    optimizers = [run.strategy.optimizer_state(optimizer) for optimizer in run.optimizers]
    return _state(run, [run.generators.drawn], weights, optimizers)


def local_state(run: Run) -> State:
    """Return of all that what this rank has, its tensors as they are in memory: for ranks with the same part."""
    weights = {name: local(value) for name, value in run.task.weights().items() if not getattr(value, "is_meta", False)}
    return _state(run, [run.generators.drawn], weights, [optimizer.state_dict() for optimizer in run.optimizers])


def _state(
    run: Run,
    drawn: Sequence[int],
    weights: Mapping[str, Any],
    optimizers: Sequence[dict[str, Any]],
    data: dict[str, Any] | None = None,
) -> State:
    run.generators.check()
    run.generators.settle(run.cursor.step)
    state = {
        "model": weights,
        "optimizer": optimizers[0],
        "optimizer_class": _classes(run.optimizers),
        "schedule": _kinds(run.schedules),
        "scheduler": run.schedules[0].scheduler.state_dict(),
        "more_optimizers": optimizers[1:],
        "more_schedulers": [schedule.scheduler.state_dict() for schedule in run.schedules[1:]],
        "precision": run.precision.state(),
        "callbacks": {name: callback.state() for name, callback in run.callbacks.items()},
        "stops": run.stops,
        "cursor": run.cursor._asdict(),
        "unfinished": None if run.unfinished is None else run.unfinished._asdict(),
        "metrics": dict(run.metrics),
        "seed": run.seed,
        "first_samples": run.train.plan.first(run.cursor.epoch) if run.cursor.batch else [],  # of an epoch that began
        "drawn": list(drawn),
        "global_batch_size": run.train.plan.global_batch_size,
        "num_samples": run.train.plan.num_samples,
        "world_size": run.world.world_size,
        "shards": run.shards,
        "switched": run.switched(),
    }
    if (data := data or run.train.state(None)) is not None:
        state["data"] = data
    return state | run.task.checkpoint(state)


def load_part(task: Task, weights: Mapping[str, torch.Tensor]) -> None:
    """Load weights as another rank has them in memory that holds the same part of the model."""
    mine = task.weights()
    dealt = [name for name, value in mine.items() if hasattr(value, "device_mesh")]
    for name in dealt:
        local(mine[name]).copy_(weights[name])
    task.load_weights(mine | {name: value for name, value in weights.items() if name not in dealt})


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
        ("optimizer", _classes(run.optimizers), state.get("optimizer_class")),
        ("scheduler", _kinds(run.schedules), state.get("schedule")),
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


def _classes(optimizers: Sequence[torch.optim.Optimizer]) -> str:
    return ", ".join(type(optimizer).__name__ for optimizer in optimizers)


def _kinds(schedules: Sequence[Schedule]) -> str:
    return ", ".join(f"{type(schedule.scheduler).__name__} by {schedule.interval}" for schedule in schedules)


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


HEARTBEAT_S = 0.25  # less than the least launcher.timeout_s


def save(run: Run, measured: bool) -> None:
    """Save a checkpoint; ``measured`` says that the monitored metric belongs to this very step.

    Non-finite weights end the run instead, so the newest checkpoint is always a good one.
    """
    run.logger.flush()  # or a kill would take points with it that do not come again
    if measured and run.task.names_metrics and not run.monitor.startswith("train/"):
        check_measured(run.monitor, run.metrics)
    fresh = run.task.measures(run.monitor, run.cursor.batch == 0) or measured or not run.val
    value = run.metrics.get(run.monitor) if fresh else None
    if value is not None:
        run.values[str(run.cursor.step)] = value
    bad = run.guard.bad_weights(run.task)  # those that are trained, whatever callbacks put in their place
    with saving(run):
        await_writer(run, bad)
        state = gather_state(run)
        run.strategy.exchanges.synchronize()
        run.checkpointer.save(state, run.cursor.step, value)
        if not run.checkpoint.async_save:
            await_writer(run, bad)
        run.saved_step = run.cursor.step
        if run.checkpoint.enabled and not run.trainer.fast_dev_run:
            run.good_step = run.saved_step
            run.note()


@contextmanager
def saving(run: Run) -> Iterator[None]:
    """Have callbacks put what is saved in its place, and what is trained back after it is gathered and written."""
    for callback in run.callbacks.values():
        callback.on_save_start(run.cursor.step)
    yield
    for callback in run.callbacks.values():
        callback.on_save(run.cursor.step)


def await_writer(run: Run, bad: Mapping[str, bool]) -> None:
    """Wait on all ranks until all have written, however long it takes: they join a collective now and then meanwhile.

    So none times out because of a slow disk, and one does if another is dead or stopped. All learn at the same time
    whether some rank has non-finite weights.
    """
    writing = 1
    while writing:
        mine = [[int(run.checkpointer.wait(HEARTBEAT_S)), sum(bad.values())]]
        busy = mine[0][0]
        writing, bad_anywhere = run.strategy.sum(torch.tensor(mine, device=run.devices[0])).tolist()
        if writing == busy == 1:
            run.checkpointer.others_are_done()
        if bad_anywhere:
            run.guard.fail_for_weights(run.cursor.step, bad, run.good_step)
