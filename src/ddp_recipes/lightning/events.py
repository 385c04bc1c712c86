"""What happens in a run, told to a module's hooks; and callbacks written for Lightning."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ddp_recipes._compat.lightning import as_it_is, is_updated, load_state, metrics_in, state_of
from ddp_recipes._compat.torch_ import note_step
from ddp_recipes.callbacks import Callback
from ddp_recipes.devices import sum_dtype
from ddp_recipes.errors import RequestError
from ddp_recipes.lightning.hooks import names_in_source
from ddp_recipes.lightning.log import Values
from ddp_recipes.lightning.refusals import refuse_cadence
from ddp_recipes.lightning.update import SteppedOptimizer
from ddp_recipes.loggers import Logger
from ddp_recipes.training.state import Run

if TYPE_CHECKING:
    from ddp_recipes.lightning.adapter import LightningTask


# Classes of Lightning that reach into its own loop, and what to use instead.
_INSTEAD = {
    "Checkpoint": "the group checkpoint (checkpoint.monitor, save_top_k, every_n_steps, …)",
    "ProgressBar": "trainer.progress",
    "GradientAccumulationScheduler": "callbacks=gradient_accumulation",
    "StochasticWeightAveraging": "callbacks=ema",
    "WeightAveraging": "callbacks=ema",
    "BatchSizeFinder": "tune=batch_size",
    "LearningRateFinder": "tune=lr",
    "DeviceStatsMonitor": "debug=profiler",
    "ThroughputMonitor": "train/samples_per_second, which is logged anyhow",
    "Timer": "trainer.max_time",
    "ModelPruning": "torch.nn.utils.prune in a callback of your own",
    "SpikeDetection": "trainer.detect_anomaly",
}

_EXCEPTIONS = ("lightning.pytorch.utilities.exceptions", "pytorch_lightning.utilities.exceptions")
_GOES_ON = ("signal", "moved")  # why a start ends whose training does not: another one goes on with it


def _raised_on(cause: str) -> BaseException:
    """Return what Lightning's loop raises on this signal, of its own class where it has been loaded."""
    if cause.startswith("SIGINT"):
        return KeyboardInterrupt()
    loaded = next((sys.modules[name] for name in _EXCEPTIONS if name in sys.modules), None)
    raised: BaseException = getattr(loaded, "SIGTERMException", SystemExit)()
    return raised


def refuse_callback(name: str, made: object) -> None:
    """Refuse a callback that works on Lightning's own loop.

    Raises:
        RequestError: says what to use instead.
    """
    for each in type(made).__mro__:
        if each.__module__.startswith(("lightning.", "pytorch_lightning.")) and each.__name__ in _INSTEAD:
            raise RequestError(
                f"callbacks.{name} is Lightning's {type(made).__name__}, which reaches into Lightning's own loop. Use "
                f"{_INSTEAD[each.__name__]} instead."
            )


class Wrapped(Callback):
    """A callback of Lightning as one of the run's: its hooks are called with the module's; here is its state."""

    def __init__(self, callback: Any) -> None:
        self.callback = callback

    def state(self) -> dict[str, Any]:
        return dict(getattr(self.callback, "state_dict", dict)())

    def load_state(self, state: Mapping[str, Any]) -> None:
        if hasattr(self.callback, "load_state_dict"):
            self.callback.load_state_dict(dict(state))


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


class Events(Callback):
    """Calls the hooks of a task's module and of Lightning's callbacks as Lightning would."""

    run: Run
    validates = True

    def __init__(self, task: LightningTask) -> None:
        self.task = task
        self.begun = self.started = False
        self._trains = False  # whether there is training to begin and to end
        self._around: BaseException | None = None  # what was being handled as the run began, which is not its own
        self.optimizers: list[SteppedOptimizer] = []
        self._before: list[Callable[[], None]] = []  # each puts a metric back as it was when a validation began

    def check(self) -> None:
        """Refuse a validation in the middle of a step, also of those that callbacks lengthen."""
        changes = [each.accumulation for each in self.run.callbacks.values()]
        refuse_cadence(type(self.task.model).__name__, self.task.trainer.run_context, changes)

    def begin(self) -> None:
        """Say that the run begins: before validation is tried out."""
        if self.begun:
            return
        self.begun, self._around = True, sys.exception()
        trainer = self.task.trainer
        trainer.run = run = self.run
        self.optimizers = [SteppedOptimizer(self.task, run, each) for each in run.optimizers]
        self._watch()
        self.task.hooks("on_fit_start")

    def _watch(self) -> None:
        """Notice backward passes that leave the gradients of one rank, and gradients without a step."""
        if self.task.manual:
            self.task.summed.watch(self.task)

    def on_start(self, directory: Path | None, task: torch.nn.Module) -> None:
        """Begin to train, with loggers: they get what was kept for them, but in a run that goes on, which had it."""
        self.begin()
        kept, self.task.trainer.kept = self.task.trainer.kept or (), None
        for call in kept if self.run.cursor.step == 0 else ():
            call()
        self.started = True
        self.task.logger.go_on({name: self.task.seen[of_set] for name, of_set in self.task.by_batch.items()})
        cursor, loop = self.run.cursor, self.task.trainer.fit_loop.epoch_loop
        self.task.trainer.epoch = loop.epoch = cursor.epoch
        loop.batch_idx = cursor.batch - 1
        for each in self.run.optimizers if cursor.step > 0 else ():
            note_step(each)  # else torch warns of a scheduler where a module that steps by itself has not done so yet
        self._agree()
        limits = self.run.trainer
        # A run that goes on may have been cut off in ending.
        self._trains = self.run.cursor.step > 0 or (0 not in (limits.max_epochs, limits.max_steps) and not self.stop)
        if self._trains:
            self.task.hooks("on_train_start")
        self._agree()

    def on_epoch_start(self, epoch: int) -> None:
        """Begin an epoch, or what is left of it: then for what no checkpoint has, such as modes."""
        self.task.trainer.epoch = epoch
        goes_on = self.run.cursor.batch > 0 or self.run.unfinished is not None
        with self._as_saved() if goes_on else nullcontext():
            self.task.hooks("on_train_epoch_start")
        self._watch()
        self._agree()

    @contextmanager
    def _as_saved(self) -> Iterator[None]:
        """Leave what a checkpoint has as it is, and log nothing: all of that was done when the epoch began."""
        task, run = self.task, self.run
        tensors = {name: each.detach().clone() for name, each in _tensors(task.model)}
        groups = [group for optimizer in run.optimizers for group in optimizer.param_groups]
        options = [deepcopy({name: value for name, value in group.items() if name != "params"}) for group in groups]
        states = [(each, deepcopy(each.state())) for each in run.callbacks.values() if isinstance(each, Wrapped)]
        logger, task.logger, task.counts = task.logger, Logger(), False
        yield
        task.logger, task.counts = logger, True
        with torch.no_grad():
            for name, tensor in _tensors(task.model):
                if name in tensors and tensor.shape == tensors[name].shape:
                    tensor.copy_(tensors[name])
        for group, former in zip(groups, options, strict=True):
            group.update(former)
        for callback, state in states:
            callback.load_state(state)

    def _frozen(self) -> list[str]:
        return [name for name, parameter in self.task.named_parameters() if not parameter.requires_grad]

    def on_step(self, step: int) -> None:
        """End a batch, and log what its step logged."""
        task, run = self.task, self.run
        due, over = step % run.trainer.log_every_n_steps == 0, run.cursor.batch == 0
        logged = self.follow()
        task.end_batch()
        self._agree()
        due |= self.stop  # the last one is logged as well
        if due or over or self._is_followed:  # else it is not read, but for this rank's by trainer.callback_metrics
            logged |= self.read()
        if due:
            self._log(logged)

    def follow(self) -> dict[str, float]:
        """Take what a batch has logged, if something looks at it in each step; return it. A collective then."""
        return self.read() if self._is_followed else {}

    def read(self) -> dict[str, float]:
        """Take what the latest batches have logged, over all ranks; return it. A collective."""
        return self._measured(self.task.training_log.steps(self.task.trainer.run_context))

    @cached_property
    def _is_followed(self) -> bool:
        """Whether something may look at each step's values: a hook that is called then, or a scheduler.

        A hook does so by ``trainer.callback_metrics`` or another one of these.
        """
        by_step = any(each.monitor is not None and each.interval == "step" for each in self.run.schedules)
        return by_step or (
            self.task.hooks.listens("on_train_batch_start", "on_train_batch_end") and self._is_in_code("_metrics")
        )

    def _is_in_code(self, name: str) -> bool:
        """Whether the code of the module, or of a callback of Lightning's form, has a name in it."""
        return any(names_in_source(each, name) for each in (self.task.model, *self.task.hooks.callbacks))

    def _agree(self) -> None:
        """Stop on all ranks what one has stopped by ``trainer.should_stop``. A collective where something may."""
        if self._may_stop:
            self.stop = self.task.trainer.strategy.reduce_boolean_decision(self.stop, all=False)

    @cached_property
    def _may_stop(self) -> bool:
        """Whether the code of the module, or of a callback, names it: others need no exchange in each step."""
        return self.run.world.world_size > 1 and self._is_in_code("should_stop")

    def keep_metrics(self) -> None:
        """Keep what the module's metrics hold, before a validation."""
        self._before = [as_it_is(each) for each in metrics_in(self.task.model).values()]

    def forget_metrics(self, put_back: bool = False) -> None:
        """Forget what the metrics held before a validation, or have them hold it again."""
        for again in self._before if put_back else ():
            again()
        self._before = []

    def alters(self, call: Callable[[], object], hooks: Sequence[str]) -> bool:
        """Call hooks; return whether they change weights, as averaged ones that take their place. A collective then."""
        context = self.task.trainer.run_context
        if context.mode != "fit" or context.parallelism.kind != "replicated" or not self.task.hooks.listens(*hooks):
            call()
            return False
        before = self._sums()
        call()
        anywhere: bool = self.task.trainer.strategy.reduce_boolean_decision(before != self._sums(), all=False)
        return anywhere

    def _sums(self) -> list[float]:
        floats = [each.detach() for _, each in _tensors(self.task.model) if each.is_floating_point()]
        sums = [each.sum(dtype=sum_dtype(each.device)).to(self.run.devices[0]) for each in floats]
        return torch.stack(sums).tolist() if sums else []

    def on_validation_start(self, step: int) -> None:
        """Begin to validate, without the gradients of the last step; whoever looks finds what that has logged."""
        self.read()
        self.keep_metrics()
        if "on_validation_model_zero_grad" not in self.task.hooks.own:
            self.task.model.zero_grad()
        self.task.hooks("on_validation_model_zero_grad")

    def on_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """End a validation."""
        self.forget_metrics()
        self.task.hooks("on_validation_end")
        self.task.hooks("on_validation_model_train")
        self.task.trainer.stage = "train"
        self._agree()

    def on_epoch_end(self, epoch: int) -> None:
        """End an epoch, and log what it came to."""
        hooks, log, context = self.task.hooks, self.task.training_log, self.task.trainer.run_context
        logged = self._measured(log.epoch(context))
        hooks("on_train_epoch_end")
        logged |= self._measured(log.epoch(context))
        hooks.of_followers("on_train_epoch_end")
        logged |= self._measured(log.epoch(context))
        log.close()
        self._log(logged)
        self._agree()

    def on_end(self) -> None:
        """End the run."""
        error = sys.exception()
        if error is not None and error is not self._around:
            self._tell(error)
            return
        if self.run.cursor.samples_seen > self.run.samples_before:
            if cut_off := self._is_cut_off():
                self.on_epoch_end(self.task.trainer.epoch)
            self.task.trainer.epoch += cut_off or self.run.cursor.batch == 0  # those that are done, as in Lightning
        if self.run.reason == "signal":
            self._tell(_raised_on(self.run.stop_controller.cause))
        if self.run.reason not in _GOES_ON:
            if self._trains:
                self.task.hooks("on_train_end")
            self.task.hooks("on_fit_end")
        self.task.tear_down()

    def _tell(self, error: BaseException) -> None:
        self.task.hooks("on_exception", error)
        if self.task.trainer.datamodule is not None:
            self.task.data_hooks.of_module("on_exception", error)

    def _is_cut_off(self) -> bool:
        """Whether a limit of steps, or a callback, has ended the run within an epoch, which ends it as well."""
        limit, run = self.run.trainer.max_steps, self.run
        reached = limit is not None and self.task.trainer.global_step >= limit
        return run.cursor.batch > 0 and (reached or bool(run.stops))

    def state(self) -> dict[str, Any]:
        """Return what the module does not keep itself.

        Optimizer steps that it took, parameters that are not trained by now, and what the epoch came to so far.
        """
        context = self.task.trainer.run_context
        self.forget_metrics(put_back=True)  # a signal has cut off a validation, which is done again
        metrics = metrics_in(self.task.model)
        updated = torch.tensor([[float(is_updated(each)) for each in metrics.values()]], device=context.devices[0])
        anywhere = context.sum(updated).tolist() if metrics else []
        return {
            "steps": self.task.trainer.steps,
            "seen": dict(self.task.seen),
            "by_batch": dict(self.task.by_batch),
            "frozen": self._frozen(),
            "log": self.task.training_log.state(context),
            "steps_logged": self.task.training_log.state(context, of_step=True),
            "logged_metrics": self.task.training_log.metrics({id(each): name for name, each in metrics.items()}),
            "metrics": {name: state_of(metrics[name]) for name, at in zip(metrics, anywhere, strict=True) if at},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore it."""
        self.task.trainer.steps = state["steps"]
        self.task.seen, self.task.by_batch = dict(state.get("seen", {})), dict(state.get("by_batch", {}))
        first = self.task.trainer.run_context.world.is_main
        self.task.training_log.load_state(state["log"], first)
        self.task.training_log.load_state(state.get("steps_logged", []), first, of_step=True)
        metrics = metrics_in(self.task.model)
        for name in metrics.keys() & state["metrics"].keys():
            load_state(metrics[name], state["metrics"][name], first)
        self.task.training_log.load_metrics(state.get("logged_metrics", ()), metrics)
        for name, parameter in self.task.named_parameters():
            if parameter.is_floating_point():
                parameter.requires_grad_(name not in state["frozen"])

    def _measured(self, values: Values) -> dict[str, float]:
        """Give values to whoever asks for metrics; return those for the loggers."""
        self.run.metrics.update(values.measured)
        return values.logged

    def _log(self, values: dict[str, float]) -> None:
        unlogged = self.task.training_log.unlogged
        if values := {name: value for name, value in values.items() if name not in unlogged}:
            self.run.logger.scalars(values, self.run.cursor.step)
