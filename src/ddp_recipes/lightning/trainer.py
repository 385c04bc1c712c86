"""What a module written for Lightning sees as ``self.trainer``."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ddp_recipes.callbacks import Callback
from ddp_recipes.checkpointing.files import content_of
from ddp_recipes.config.settings import TrainerSettings
from ddp_recipes.errors import RequestError
from ddp_recipes.lightning.checkpoint import WEIGHTS_ONLY
from ddp_recipes.lightning.hooks import OF_EVALUATION, OF_STEP
from ddp_recipes.lightning.views import (
    Checkpoints,
    FitLoop,
    LoaderView,
    Metrics,
    ModuleLogger,
    PredictLoop,
    StrategyView,
    unavailable,
)
from ddp_recipes.runtime.files import write_aside
from ddp_recipes.tasks import RunContext, Schedule
from ddp_recipes.training.state import Run, gather_state, saving

_KEYS = ("limit_", "gradient_", "log_every", "check_val", "val_check", "overfit", "fast_dev")


class Trainer:
    """The run by Lightning's names, as far as modules and callbacks use them.

    Attributes:
        run: what is being trained, once it is.
        run_context: what the run is made of; set before any hook is called.
        epoch: whose batches are being trained on, or were last.
        steps: optimizer steps that the module took itself, by manual optimization.
        stage: ``train``, ``sanity_check``, ``validate``, ``test`` or ``predict``.
        kept: calls of loggers before training starts, when they are made; ``None`` from then on.
    """

    barebones = False
    received_sigterm = False
    enable_validation = True
    early_stopping_callback = progress_bar_callback = None
    reload_dataloaders_every_n_epochs = 0
    num_sanity_val_steps = 0

    run_context: RunContext

    def __init__(self, task: Any) -> None:
        self.lightning_module = self.model = task.model
        self.run: Run | None = None
        self.datamodule: Any = None
        self.callbacks: list[Any] = []
        self.events: Callback | None = None
        self.epoch = self.steps = 0
        self.manual = False
        self.stage = "train"
        self.kept: list[Callable[[], object]] | None = []
        self.logger = ModuleLogger(self, task)
        self.fit_loop = FitLoop(self)
        self.predict_loop = PredictLoop(self)
        self.profiler = SimpleNamespace(profile=nullcontext)  # debug=profiler measures phases
        self.brought: Mapping[str, Any] = {}
        self.schedules: Sequence[Schedule] = ()  # of the module itself
        self._metrics: dict[str, float] = {}  # outside of training
        self._task = task

    def __getattr__(self, name: str) -> Any:
        if name.startswith(_KEYS):
            return getattr(self._settings, name)
        raise unavailable("trainer", name, self)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith(_KEYS) or name == "ckpt_path":
            key = name if name == "ckpt_path" else f"trainer.{name}"
            raise RequestError(
                f"{type(self._task.model).__name__} or a callback sets trainer.{name}={value}, which would change "
                f"nothing by now. Set it in the config: {key}."
            )
        super().__setattr__(name, value)

    services = property(attrgetter("_task.services"))  # what the module calls on itself

    @property
    def _settings(self) -> TrainerSettings:
        """The run's own keys, which a callback may have changed, once it has begun."""
        return self.run_context.trainer if self.run is None else self.run.trainer

    # Where the run is.

    current_epoch = property(attrgetter("epoch"))
    accumulate_grad_batches = property(attrgetter("_settings.accumulate_grad_batches"))
    precision = property(attrgetter("run_context.trainer.precision"))
    ckpt_path = property(attrgetter("run_context.ckpt_path"))

    @property
    def global_step(self) -> int:
        return self.steps if self.manual else self._step

    @property
    def _step(self) -> int:
        return 0 if self.run is None else self.run.cursor.step

    @property
    def is_last_batch(self) -> bool:
        """Whether the batch is the last of its epoch."""
        train = self.run_context.loaders.get("train")
        return train is not None and self.fit_loop.epoch_loop.batch_idx + 1 == len(train)

    @property
    def max_epochs(self) -> int | None:
        """``trainer.max_epochs``; -1 without that limit."""
        return -1 if self.run_context.trainer.max_epochs is None else self.run_context.trainer.max_epochs

    @property
    def max_steps(self) -> int:
        """``trainer.max_steps``; -1 without that limit."""
        return -1 if self.run_context.trainer.max_steps is None else self.run_context.trainer.max_steps

    @property
    def estimated_stepping_batches(self) -> float:
        """Optimizer steps of the whole run, if no epoch ends before its limit; infinite if only time limits it."""
        self._need_loaders("estimated_stepping_batches")
        context, batches = self.run_context, self.num_training_batches
        steps = context.total_steps if math.isinf(batches) else context.total_steps_of(int(batches))
        return math.inf if steps is None else steps

    @property
    def num_training_batches(self) -> float:
        """Batches of an epoch, at most, the same on each rank; infinity if that shows at its end."""
        self._need_loaders("num_training_batches")
        train = self.run_context.loaders.get("train")
        return math.inf if train is None else train.plan.planned_batches

    def _need_loaders(self, name: str) -> None:
        context = self.run_context
        if context.mode == "fit" and "train" not in context.loaders:
            raise RequestError(
                f"trainer.{name} is asked for in {self._task.hooks.current or 'setup'}, before there are loaders. Ask "
                f"for it in configure_optimizers or later, or for the length of a loader that you make."
            )

    num_val_batches = property(lambda self: self._batches("val"))
    num_test_batches = property(lambda self: self._batches("test"))

    def _batches(self, split: str) -> list[float]:
        """Return the batches of an epoch of each data set of a split, on this rank."""
        return [each.plan.planned_batches for name, each in self.run_context.loaders.items() if name.startswith(split)]

    @property
    def evaluates_several(self) -> bool:
        """Whether several data sets are evaluated one after the other."""
        return sum(name != "train" for name in self.run_context.loaders) > 1

    @property
    def train_dataloader(self) -> "LoaderView | None":
        """This rank's training batches, with their ``dataset``."""
        loaders = self._loaders("train")
        return loaders if isinstance(loaders, LoaderView) else None

    val_dataloaders = property(lambda self: self._loaders("val"))
    test_dataloaders = property(lambda self: self._loaders("test"))
    predict_dataloaders = property(lambda self: self._loaders("predict"))

    def _loaders(self, split: str) -> Any:
        """Return loaders as the module's hook returns them: one, or a list or dict of several; ``None`` without any."""
        loaders = self.run_context.loaders
        if split == "predict" and self.run_context.mode == "predict":
            return next((LoaderView(loader) for loader in loaders.values()), None)
        found = {
            name.partition("/")[2]: LoaderView(each)
            for name, each in loaders.items()
            if name.partition("/")[0] == split
        }
        brought = self.brought.get(split)
        if not found:
            return None
        if "" in found and not isinstance(brought, (list, tuple, Mapping)):
            return found[""]
        return list(found.values()) if isinstance(brought, (list, tuple)) else found

    @property
    def should_stop(self) -> bool:
        """Whether training ends after this step."""
        return self.events is not None and self.events.stop

    @should_stop.setter
    def should_stop(self, stop: bool) -> None:
        if self.events is not None:
            self.events.stop = stop

    # What it works with.

    strategy = property(StrategyView)

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        return [] if self.run is None else list(self.run.optimizers)

    @property
    def lr_scheduler_configs(self) -> list[Any]:
        """The run's schedulers, each with ``scheduler``, ``interval``, ``frequency`` and ``monitor``.

        The config's is among them where the module brings none, but for the one that leaves the rate as it is.
        """
        every = [] if self.run is None else self.run.schedules
        schedules = [each for each in every if each in self.schedules or not _leaves_rate(each.scheduler)]
        return [SimpleNamespace(**vars(each), reduce_on_plateau=each.monitor is not None) for each in schedules]

    @cached_property
    def loggers(self) -> list[ModuleLogger]:
        """The run's loggers, in the order of the config."""
        return [self.logger, *(ModuleLogger(self, self._task, at) for at in range(1, len(self.run_context.loggers)))]

    @property
    def default_root_dir(self) -> str:
        return str(self.run_context.directory)

    log_dir = default_root_dir

    @property
    def device_ids(self) -> list[int]:
        """The numbers of this machine's processes, each of which has devices of its own."""
        return list(range(self.num_devices))

    @property
    def precision_plugin(self) -> Any:
        """The precision that callbacks run the module in, as ``ModelSummary`` does."""
        return SimpleNamespace(forward_context=nullcontext if self.run is None else self.run.precision.forward)

    @property
    def _data_connector(self) -> Any:
        """The object that finds whose transfer hooks get the module's ``example_input_array``."""
        hooks = self._task.data_hooks
        of = SimpleNamespace(get_instance=lambda name: hooks.module if name in hooks.own else self.model)
        return SimpleNamespace(_datahook_selector=of)

    @property
    def _logger_connector(self) -> Any:
        """The object that callbacks ask whether this step is logged."""
        every = self.run_context.trainer.log_every_n_steps
        return SimpleNamespace(should_update_logs=(self._step + 1) % every == 0)

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """The latest value of each metric; as long as ranks have not exchanged what was just logged, this rank's.

        What a callback puts there is one from then on.
        """
        task, hook = self._task, self._task.hooks.current
        latest: dict[str, float] = {}
        if self.training:
            latest = task.training_log.latest(of_step=hook in OF_STEP)
        elif hook not in OF_EVALUATION:
            latest = task.evaluation_log.latest(of_step=False)
        values = {**(self.run.metrics if self.run else {}), **self._metrics, **latest}
        return Metrics({name: torch.tensor(value) for name, value in values.items()}, self.measured)

    def measured(self, values: Mapping[str, float]) -> None:
        """Take values before the run has them: as soon as they are known."""
        kept = self._metrics if self.run is None or self.sanity_checking else self.run.metrics
        kept.update(values)

    def forget(self) -> None:
        """Forget those of the first look at validation."""
        self._metrics.clear()

    logged_metrics = progress_bar_metrics = callback_metrics

    @property
    def checkpoint_callback(self) -> "Checkpoints | None":
        """The object that has the paths of the run's checkpoints; ``None`` where it saves none."""
        return Checkpoints(self.run, self.run_context) if self.run and self.run.checkpoint.enabled else None

    @property
    def checkpoint_callbacks(self) -> "list[Checkpoints]":
        """A list of the one checkpoint callback; empty where the run saves none."""
        return [] if self.checkpoint_callback is None else [self.checkpoint_callback]

    def save_checkpoint(self, filepath: str | Path, weights_only: bool = False, *_: Any, **__: Any) -> None:
        """Save a checkpoint to a file of one's own. A collective, as in Lightning: call it on each rank.

        Raises:
            RequestError: nothing is trained, or no rank has the whole of the weights.
        """
        if self.run is None or self.run.strategy.settings.kind == "sharded":
            raise RequestError(
                f"trainer.save_checkpoint saves what is trained, on one rank; this is mode={self.run_context.mode} "
                f"with strategy={self.run_context.parallelism.name}. Use checkpoint.every_n_steps or every_n_epochs."
            )
        with saving(self.run):
            state = gather_state(self.run)
            if self.is_global_zero:
                content = content_of({**state, "checkpointer": self.run.checkpointer.state()})
                if weights_only:
                    content = {name: value for name, value in content.items() if name in WEIGHTS_ONLY}
                write_aside(Path(filepath), lambda file: torch.save(content, file))

    # Who it is: this process, among all and on its machine, how many there are in all and there, and the machines.

    global_rank = property(attrgetter("run_context.world.rank"))
    local_rank = property(attrgetter("run_context.world.local_rank"))
    world_size = property(attrgetter("run_context.world.world_size"))
    num_devices = property(attrgetter("run_context.world.local_world_size"))
    node_rank = property(attrgetter("run_context.world.node_rank"))
    num_nodes = property(attrgetter("run_context.world.nnodes"))
    is_global_zero = property(attrgetter("run_context.world.is_main"))

    # What it is doing.

    @property
    def state(self) -> Any:
        """The stage of the run (fit, validate, …), and the one that is under way."""
        return SimpleNamespace(fn=self.run_context.mode, stage=self.stage, status="running", finished=False)

    training = property(lambda self: self.stage == "train")
    sanity_checking = property(lambda self: self.stage == "sanity_check")
    validating = property(lambda self: self.stage == "validate")
    testing = property(lambda self: self.stage == "test")
    predicting = property(lambda self: self.stage == "predict")
    evaluating = property(lambda self: self.stage in ("validate", "test"))

    def print(self, *arguments: Any, **options: Any) -> None:
        """Print on rank 0."""
        if self.is_global_zero:
            print(*arguments, **options)


def _leaves_rate(scheduler: Any) -> bool:
    return isinstance(scheduler, torch.optim.lr_scheduler.ConstantLR) and scheduler.factor == 1
