"""Runs a ``LightningModule`` as it is, or any module that has Lightning's methods."""

import inspect
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ddp_recipes._compat.lightning import as_it_is, is_combined, metrics_in
from ddp_recipes.callbacks import Callback
from ddp_recipes.data.keyed import samples_in, to_device
from ddp_recipes.data.loader import Batch
from ddp_recipes.devices import is_accelerator
from ddp_recipes.errors import RequestError
from ddp_recipes.lightning import checkpoint, optimizers, update
from ddp_recipes.lightning.events import Events, Wrapped, refuse_callback
from ddp_recipes.lightning.hooks import Hooks, refuse_data_hooks, refuse_hooks
from ddp_recipes.lightning.log import Log, everywhere
from ddp_recipes.lightning.refusals import refuse_cadence, refuse_context, refuse_rows
from ddp_recipes.lightning.services import Services
from ddp_recipes.lightning.trainer import Trainer
from ddp_recipes.lightning.update import Summed
from ddp_recipes.lightning.views import InShards
from ddp_recipes.runtime.tensors import keeping_ties
from ddp_recipes.tasks import OwnOptimizers, RunContext, StepOutput, Task
from ddp_recipes.tasks.blocks import is_called
from ddp_recipes.tasks.task import Modes
from ddp_recipes.training.state import Run, Update
from ddp_recipes.training.update import MicroBatch

log = logging.getLogger(__name__)

_STAGES = {"val": "validation", "test": "test", "predict": "predict"}  # by split, as hooks call them
_BEFORE_TRANSFER = ("on_before_batch_transfer", "transfer_batch_to_device")  # get a batch as it is fetched
_LOSSES = ("loss", "val_loss", "val/loss", "valid_loss", "valid/loss", "validation_loss", "validation/loss")


class LightningTask(Task):
    """A task around a ``LightningModule``, or any module with those methods; Lightning itself need not be installed.

    What the module logs keeps its name. Each value is the mean over all samples of all ranks; a metric of torchmetrics
    is computed at the end of the epoch. docs/lightning.md says what differs from Lightning.

    Args:
        model: has ``training_step(batch, batch_idx)`` giving the loss or a dict with ``loss``.

    Raises:
        RequestError: the model has no ``training_step``, or a hook that is not called here.
    """

    gathers_state = names_metrics = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, nn.Identity())
        self.trainer = Trainer(self)
        self.hooks = Hooks(model, self.trainer, self.trainer.callbacks)
        if "training_step" not in self.hooks.own:
            raise RequestError(
                f"task=lightning needs a module with training_step, and {type(model).__name__} has none. "
                f"For a plain module use task=classification or task=regression."
            )
        refuse_hooks(model)
        self.manual = self.trainer.manual = not getattr(model, "automatic_optimization", True)
        self.accumulates = not self.manual
        self.validates = "validation_step" in self.hooks.own
        self.events = self.trainer.events = Events(self)
        self.batch: Any = None
        self.batch_idx = self.dataloader_idx = 0
        self.at = 0, 0  # the numbers of the batch and of the part of it, which may be one of several of this rank
        self.counts = True  # whether the batch has samples
        self.seen: dict[str, int] = {}  # batches of each validation set
        self.by_batch: dict[str, str] = {}  # the set of each name that is logged for its batches
        self._points: list[tuple[str, list[tuple[str, int, float]]]] = []  # of an evaluation that is not over, by set
        self.summed = Summed()
        self.output: Any = {}  # of the latest training step, as its hooks get it
        self.weight = 1.0  # of the loss in manual optimization
        self.training_log = Log(type(model).__name__, of_training=True)
        self.evaluation_log = Log(type(model).__name__, of_training=False)
        self.logged = self.training_log.names
        self.of_step: dict[str, list[Tensor]] = {}  # logged in the latest evaluation step, each [samples]
        self._taken: dict[str, int] = {}  # arguments of each step
        self.configured: dict[str, Callback] = {}  # by the module itself
        self.left_out: set[str] = set()  # of checkpoints, which was said
        self._evaluated_to: dict[str, float] = {}  # in the evaluation under way
        self._stage = ""
        self.services = Services(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> "LightningTask":
        """Return a copy whose module has its trainer, which Lightning leaves out; data are not copied."""
        context = vars(self.trainer).get("run_context")
        data = [] if context is None else [each.dataset for each in context.loaders.values()]
        memo |= {id(each): each for each in (self.trainer.datamodule, self.trainer.brought, *data)}
        copied = memo[id(self)] = type(self).__new__(type(self))
        vars(copied).update(deepcopy(vars(self), memo))
        model: Any = copied.model
        model.trainer = copied.trainer
        return copied

    # What the run asks for.

    def state_dict(self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Return all weights, also those that the module's own ``state_dict`` leaves out: a resume needs them."""
        options = {"destination": destination, "prefix": f"{prefix}model.", "keep_vars": keep_vars}
        return nn.Module.state_dict(self.model, **options)

    def attach(self, context: RunContext) -> None:
        """Tell module and callbacks what run they are in, and have them set up."""
        trainer, hooks = self.trainer, self.hooks
        trainer.run_context = context
        trainer.kept = trainer.kept if context.mode == "fit" else None
        refuse_context(self.model, hooks.own, self.manual, context)
        made = hooks.of_module("configure_callbacks")
        own = [] if made is None else made if isinstance(made, Sequence) else [made]
        self._leave_to(own)
        for each in own:
            kind, several = type(each).__name__, sum(type(other) is type(each) for other in self.hooks.callbacks)
            name = f"{kind} of the module" + (f", {several + 1}" if several else "")
            if (wrapped := self.callback(name, each)) is None:
                raise RequestError(
                    f"{type(self.model).__name__}.configure_callbacks returns a {type(each).__name__}, which is no "
                    f"callback of Lightning."
                )
            self.configured[name] = wrapped
        self._attach_data(context)
        hooks("setup", context.mode)
        hooks("configure_model")
        with keeping_ties(self.model):
            self.model.to(context.devices[0])

    def _leave_to(self, own: Sequence[Any]) -> None:
        """Drop callbacks of the config where the module brings one of their class, or of a class under it."""
        replaced = [each for each in self.hooks.callbacks if any(issubclass(type(other), type(each)) for other in own)]
        for each in replaced:
            self.trainer.callbacks.remove(each)
            if self.trainer.run_context.world.is_main:
                log.warning(
                    "%s.configure_callbacks brings a %s: as in Lightning, it takes the place of that in callbacks.",
                    type(self.model).__name__,
                    type(each).__name__,
                )

    def _attach_data(self, context: RunContext) -> None:
        trainer, datamodule = self.trainer, context.datamodule
        self.data_hooks = Hooks(self.model if datamodule is None else datamodule, trainer)
        trainer.datamodule = datamodule
        if datamodule is not None:
            refuse_data_hooks(datamodule)
            datamodule.trainer = trainer
        hooks = [self.data_hooks, *([] if datamodule is None else [self.hooks])]
        preparing = [each for each in hooks if "prepare_data" in each.own]
        if preparing:

            def prepare() -> None:
                for each in preparing if context.world.local_rank == 0 else []:
                    each.of_module("prepare_data")

            context.first_on_node(prepare)
        if datamodule is not None:
            self.data_hooks.of_module("setup", context.mode)

    def dataloaders(self, mode: str) -> dict[str, Any]:
        """Return the loaders of the data module, or of the module itself."""
        names = {"fit": ("train", "val"), "validate": ("val",), "export": ()}.get(mode, (mode,))
        found = {
            split: made for split in names if (made := self.data_hooks.of_module(f"{split}_dataloader")) is not None
        }
        if names and not found:
            raise RequestError(
                f"data=lightning, and {type(self.data_hooks.module).__name__} has no {names[0]}_dataloader. Give a "
                f"data module as data.datamodule, or choose another data."
            )
        for split, made in found.items():
            if split != "train" and is_combined(made):  # which gives tuples of batch and numbers
                raise RequestError(
                    f"{type(self.data_hooks.module).__name__}.{split}_dataloader returns a CombinedLoader. Return the "
                    f"list or dict of its loaders, which are evaluated one after the other."
                )
        self.trainer.brought = found
        return found

    def callback(self, name: str, made: Any) -> Callback | None:
        """Take a callback written for Lightning: it is told what its methods are called for."""
        if not any(callable(getattr(made, hook, None)) for hook in ("on_train_start", "on_fit_start", "setup")):
            return None
        refuse_callback(name, made)
        self.trainer.callbacks.append(made)
        return Wrapped(made)

    def checkpoint(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return Lightning's own keys, and what the module adds."""
        return checkpoint.entries(self, state)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Give the module what it added."""
        checkpoint.restore(self, state)
        self.events.begin()

    def callbacks(self) -> dict[str, Callback]:
        """Return what calls the module's hooks."""
        return {"task": self.events, **self.configured}

    @property
    def called(self) -> list[nn.Module]:
        """The module, and the parts of it: its steps may call either."""
        return [self.model, *_parts(self.model)]

    def configure_optimizers(self) -> OwnOptimizers | None:
        """Return what the module configures; ``None`` without that."""
        if "train" in self.trainer.run_context.loaders:
            refuse_cadence(type(self.model).__name__, self.trainer.run_context)
        refuse_rows(type(self.model).__name__, self.hooks.callbacks, self.trainer.run_context)
        return optimizers.of_module(self)

    @property
    def steps(self) -> int | None:  # type: ignore[override]
        """Optimizer steps of manual optimization; ``None`` of any other."""
        return self.trainer.steps if self.manual else None

    def update(self, run: Run, batches: Iterator[Batch], measured: bool) -> Update:
        """Take an optimizer step, or let the module take its own."""
        return (update.manual if self.manual else update.automatic)(self, run, batches, measured)

    # Training.

    def begin_batch(self, each: MicroBatch) -> MicroBatch:
        """Return a batch as the module's hooks make it, and say that it begins; one of shards has begun already."""
        self._enter(each.batch.number, each.batch.shard, each.batch.num_samples > 0)
        self.dataloader_idx = 0  # it was a validation set's
        self.batch = self._transferred(each.batch.data)
        if not self.in_shards:
            self._say_begin()
        return each._replace(batch=each.batch._replace(data=self.batch))

    def begin_shards(self, number: int) -> None:
        """Say, on each rank, that a batch begins that is computed in shards."""
        self.enter_shards(number)
        self._say_begin()

    def enter_shards(self, number: int) -> None:
        """Have hooks see a batch that is computed in shards as one, though no rank has the whole of it."""
        self._enter(number, 0, True)
        self.batch = self.output = InShards(self, number)

    def pass_over(self, number: int) -> None:
        """Note a batch of which this rank has no sample: hooks after it are called on all ranks, but log nothing."""
        self._enter(number, 0, False)

    def _enter(self, number: int, shard: int, counts: bool) -> None:
        loop = self.trainer.fit_loop.epoch_loop
        self.batch_idx = loop.batch_idx = number
        loop.epoch = self.trainer.epoch
        self.at, self.counts = (number, shard), counts

    def _say_begin(self) -> None:
        if self.hooks("on_train_batch_start", self.batch, self.batch_idx) == -1:
            raise RequestError(
                f"{type(self.model).__name__}.on_train_batch_start returns -1, to leave out the rest of the epoch. "
                f"That is not there; set trainer.limit_train_batches."
            )

    @property
    def in_shards(self) -> bool:
        """Whether the strategy computes a batch in shards, as many on any number of ranks."""
        return self.trainer.run_context.parallelism.fixed_shards is not None

    @property
    def samples(self) -> int:
        """The samples that a value counts for which is logged now."""
        if isinstance(self.batch, InShards):
            return self.batch.samples
        return 1 if self.batch is None else samples_in(self.batch)

    def measures(self, name: str, epoch_is_over: bool) -> bool:
        """Read what the module logs in each step; at the end of an epoch that is done."""
        log = self.training_log
        if name in log.of_steps and not epoch_is_over:
            self.events.read()
        return name in (log.names if epoch_is_over else log.of_steps) or super().measures(name, epoch_is_over)

    def end_batch(self) -> None:
        """Say that the batch is over."""
        self.hooks("on_train_batch_end", self.output, self.batch, self.batch_idx)
        self.counts = True  # what is logged outside of batches does

    def training_step(self, batch: Any) -> StepOutput:
        """Return the loss of the module's own step."""
        with nullcontext() if self.counts else self.uncounted():
            output = self.hooks.of_module("training_step", *self._arguments("training_step", batch))
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if self.manual and loss is None:
            loss = torch.zeros(0)
        if not isinstance(loss, Tensor):
            raise RequestError(
                f"{type(self.model).__name__}.training_step returns {type(output).__name__}, which has no loss. Return "
                f"the loss, or a dict with it under 'loss'."
            )
        if loss.numel() > 1:
            raise RequestError(
                f"{type(self.model).__name__}.training_step returns a loss of shape {list(loss.shape)}. Return a "
                f"single number, e.g. its mean()."
            )
        loss = loss if loss.dim() == 0 or not loss.numel() else loss.reshape(())
        share = loss.detach() / self.trainer.accumulate_grad_batches  # as Lightning gives it to its hooks
        self.output = {"loss": share} if share.numel() else {}
        self.output |= {name: value for name, value in _items(output) if name != "loss"}
        return StepOutput(loss, {}, samples_in(batch))

    # Evaluation.

    @property
    def unlogged(self) -> Collection[str]:  # type: ignore[override]
        """Names that a module logs with ``logger=False``."""
        return self.evaluation_log.unlogged

    def everywhere(self, names: Sequence[str]) -> Sequence[str]:
        """Return the names that were logged on any rank. A collective."""
        return everywhere(names, self.trainer.run_context)

    def enter_training(self) -> None:
        """Leave modes to the module, as Lightning does."""

    def enter_evaluation(self, split: str) -> None:
        """Put all in eval mode, or have the module do so."""
        self._stage = _STAGES[split]
        refuse_rows(type(self.model).__name__, self.hooks.callbacks, self.trainer.run_context)
        sanity = split == "val" and self.trainer.run_context.mode == "fit" and not self.events.started
        self.trainer.stage = "sanity_check" if sanity else {"val": "validate"}.get(split, split)
        if sanity:
            self.events.begin()
            self.events.keep_metrics()
            self.hooks("on_sanity_check_start")
        self._modes = Modes(self)
        if f"on_{self._stage}_model_eval" not in self.hooks.own:
            self.eval()

    def leave_evaluation(self) -> None:
        """Put each module in the mode that it was in before, unless the module has done so."""
        if self._modes is not None and f"on_{self._stage}_model_train" in self.hooks.own:
            self._modes = None
        super().leave_evaluation()

    def start_evaluation(self, split: str, number: int) -> None:
        """Begin with a data set; the first one begins the evaluation."""
        stage = _STAGES[split]
        if number:
            self._measure()  # what the one before came to
        else:
            self._points = []  # those of an evaluation that was cut off, and is done again
        self.dataloader_idx, self.batch_idx = number, -1
        if number == 0:
            events = [f"on_{stage}_{event}" for event in ("model_eval", "start", "epoch_start")]
            self.is_altered = self.events.alters(lambda: [self.hooks(event) for event in events], events)

    def end_evaluation(self, split: str, metrics: dict[str, float]) -> dict[str, float]:
        """Return the metrics together with what was logged for the whole of the evaluation."""
        stage = _STAGES[split]
        self.trainer.measured(metrics)
        self._measure()
        self.hooks(f"on_{stage}_epoch_end")
        self._measure()
        self._log_points()
        metrics, self._evaluated_to = metrics | self._evaluated_to, {}
        if self.trainer.stage != "validate" or self.trainer.run_context.mode != "fit":
            self.hooks(f"on_{stage}_end")
            self.hooks(f"on_{stage}_model_train")
        self.evaluation_log.close()
        if self.trainer.stage == "sanity_check":
            self.hooks("on_sanity_check_end")
            self.events.forget_metrics(put_back=self.events.run.cursor.step > 0)  # a run that goes on has none there
            self.trainer.stage = "train"
            self.trainer.forget()
        if self.trainer.run_context.mode != "fit":
            self.tear_down()
        return metrics

    def _measure(self) -> None:
        """Take what was logged so far, for callbacks and the module may ask for it. A collective."""
        context = self.trainer.run_context
        if self.trainer.stage == "predict":
            return
        points = self.evaluation_log.points(context)
        values = self.evaluation_log.epoch(context).measured
        self._evaluated_to |= values
        self.trainer.measured(values)
        if points and not self.trainer.sanity_checking:
            evaluated = [name for name in context.loaders if name != "train"]
            self._points.append((evaluated[self.dataloader_idx], points))

    def _log_points(self) -> None:
        """Log what was logged with ``on_step=True``: over the batches of a data set, counted from the first one."""
        step = 0 if self.trainer.run is None else self.trainer.run.cursor.step
        for of_set, points in self._points:
            before = self.seen.get(of_set, 0)
            batches: dict[int, dict[str, float]] = {}
            for name, number, value in points:
                if name not in self.unlogged:
                    batches.setdefault(number, {})[name] = value
                    self.by_batch[name] = of_set
            for number, values in sorted(batches.items()):
                self.logger.of_batch(values, before + number, step)
            self.seen[of_set] = before + len(self.trainer.run_context.loaders[of_set])

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Keep a step out of what the module's metrics hold."""
        put_back = [as_it_is(each) for each in metrics_in(self.model).values()]
        counted, self.counts = self.counts, False
        yield
        self.counts = counted
        for each in put_back:
            each()

    def tear_down(self) -> None:
        """Have data module, callbacks and module clear up."""
        if self.trainer.datamodule is not None:
            self.data_hooks.of_module("teardown", self.trainer.run_context.mode)
        self.hooks("teardown", self.trainer.run_context.mode)

    def validation_step(self, batch: Any) -> StepOutput:
        """Return the loss of the module's own step, and what it logged as metrics."""
        return self._evaluated("validation", batch)

    def test_step(self, batch: Any) -> StepOutput:
        """Return loss and outputs of the module's test step, or of its validation step where it has no other."""
        return self._evaluated("test" if "test_step" in self.hooks.own else "validation", batch)

    def predict_step(self, batch: Any) -> Any:
        """Return what the module predicts."""
        loop = self.trainer.predict_loop
        loop.begin(self.position.indices)
        arguments = self._begin_evaluated("predict", batch)
        if "predict_step" in self.hooks.own:
            output = self.hooks.of_module("predict_step", *self._arguments("predict_step", arguments[0]))
        else:
            output = super().predict_step(arguments[0])
        loop.keep(output)
        self.hooks("on_predict_batch_end", output, *arguments)
        return output

    def metric_name(self, prefix: str, name: str) -> str:
        """Return the name that the module gave; its returned loss is ``val/loss``."""
        return f"{prefix}/loss" if name == "loss" else name

    def _begin_evaluated(self, stage: str, batch: Any) -> tuple[Any, ...]:
        self.batch_idx = self.position.batch
        self.at = self.position.batch, self.position.shard
        self.batch = self._transferred(batch)
        arguments = (self.batch, self.batch_idx, *([self.dataloader_idx] if self.trainer.evaluates_several else []))
        self.hooks(f"on_{stage}_batch_start", *arguments)
        return arguments

    def _evaluated(self, stage: str, batch: Any) -> StepOutput:
        method = f"{stage}_step"
        arguments = self._begin_evaluated(stage, batch)
        self.of_step = {}
        output = self.hooks.of_module(method, *self._arguments(method, self.batch))
        self.hooks(f"on_{stage}_batch_end", output, *arguments)
        values = {name: torch.cat(logged) for name, logged in self.of_step.items()}
        self.of_step = {}
        loss = output.get("loss") if isinstance(output, Mapping) else output
        logged = next((values[name] for name in values if name.partition("/dataloader_idx_")[0] in _LOSSES), None)
        if isinstance(loss, Tensor) and loss.numel() == 1:
            loss = loss.reshape(())
        else:
            loss = torch.zeros(0) if logged is None else logged.mean()
        # Of how many samples a batch is, whoever logs its loss knows best: the first tensor of a graph is its nodes.
        return StepOutput(loss, values, samples_in(batch) if logged is None else len(logged))

    # Helpers.

    def _arguments(self, method: str, batch: Any) -> list[Any]:
        """Return as many of batch, batch_idx and dataloader_idx as the module's method takes."""
        if method not in self._taken:
            self._taken[method] = self._takes(method)
        return [batch, max(self.batch_idx, 0), self.dataloader_idx][: self._taken[method]]

    def _takes(self, method: str) -> int:
        parameters = inspect.signature(getattr(self.model, method)).parameters.values()
        if any(each.name == "dataloader_iter" for each in parameters):
            raise RequestError(
                f"{type(self.model).__name__}.{method} takes dataloader_iter, to draw batches by itself. Allowed: "
                f"batch and batch_idx."
            )
        some = any(each.kind is each.VAR_POSITIONAL for each in parameters)
        named = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
        return 2 if some else len(named)

    @cached_property
    def moves_batches(self) -> bool:  # type: ignore[override]
        """Whether a hook gets them as they are fetched."""
        return bool({*_BEFORE_TRANSFER} & (self.hooks.own | self.data_hooks.own))

    def _transferred(self, batch: Any) -> Any:
        context = self.trainer.run_context
        device = context.devices[0]
        for name in (*_BEFORE_TRANSFER, "on_after_batch_transfer"):
            hooks = self.data_hooks if name in self.data_hooks.own else self.hooks
            transfers = name.startswith("transfer")
            if name in hooks.own:
                batch = hooks.of_module(name, batch, *([device] if transfers else []), self.dataloader_idx)
            elif transfers and self.moves_batches and is_accelerator(device):
                batch = to_device(batch, device, any(loader.pin_memory for loader in context.loaders.values()))
        return batch


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the parts of a module that have parameters, of lists of modules their elements; no metrics, no scripts."""
    for each in module.children():
        if not is_called(each):
            yield from _parts(each)
        elif next(each.parameters(), None) is not None and not isinstance(each, torch.jit.ScriptModule):
            yield from [] if metrics_in(each) else [each]


def _items(output: Any) -> Any:
    return output.items() if isinstance(output, Mapping) else ()
