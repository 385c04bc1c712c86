"""What the loop works with, what of it a checkpoint holds, and how that is saved."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddp_recipes._compat.torch_ import local
from ddp_recipes.callbacks import Callback
from ddp_recipes.checkpointing.files import State
from ddp_recipes.checkpointing.manager import Checkpointer
from ddp_recipes.config.settings import CheckpointSettings, TrainerSettings, check_measured
from ddp_recipes.data.loader import Batch, Loader, skipped_of
from ddp_recipes.loggers import Logger
from ddp_recipes.reporting.progress import Progress
from ddp_recipes.runtime.seeding import Generators
from ddp_recipes.runtime.world import World
from ddp_recipes.strategies import Strategy
from ddp_recipes.strategies.base import Wrapped, by_rank
from ddp_recipes.tasks import Schedule, Task
from ddp_recipes.training.cadence import Cursor, StopController
from ddp_recipes.training.clock import Clock, Flops
from ddp_recipes.training.guards import Losses, NonFiniteGuard
from ddp_recipes.training.hooks import RunHooks
from ddp_recipes.training.precision import Precision

Metrics = dict[str, float]


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
        "optimizer_class": classes_of(run.optimizers),
        "schedule": kinds_of(run.schedules),
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


def classes_of(optimizers: Sequence[torch.optim.Optimizer]) -> str:
    """Return the optimizers' classes in words."""
    return ", ".join(type(optimizer).__name__ for optimizer in optimizers)


def kinds_of(schedules: Sequence[Schedule]) -> str:
    """Return the schedulers' classes and intervals in words."""
    return ", ".join(f"{type(schedule.scheduler).__name__} by {schedule.interval}" for schedule in schedules)


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
