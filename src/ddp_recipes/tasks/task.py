"""What a strategy wraps: module, loss and metrics, whose forward gives the loss of a batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ddp_recipes.config.parallelism import StrategySettings
from ddp_recipes.config.settings import TrainerSettings
from ddp_recipes.devices import sum_dtype
from ddp_recipes.errors import RequestError
from ddp_recipes.loggers import Logger
from ddp_recipes.runtime.world import World
from ddp_recipes.tasks.metrics import Accuracy, is_stateful, of_samples, summed

# What the loop logs as train/… itself, beside the loss.
_OF_THE_LOOP = ("lr", "grad_norm", "samples_per_second", "epoch", "flops_per_second", "mfu", "peak_memory_bytes")
_ELEMENTWISE = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss)


@dataclass(frozen=True)
class RunContext:
    """Facts of the run that a task is made for: mode, loaders, directory, collectives.

    Attributes:
        loaders: by split, such as ``train``; several validation sets are ``val/<name>``. Still empty where the task
            brings them itself.
        directory: the run's.
        sum: over rows and ranks, [rows, ...] to [...]; a collective.
        first_on_node: calls a function on one rank of each node before it does so on the others.
        total_steps_of: gives the optimizer steps of training, of the batches in an epoch.
        datamodule: what the config gives as ``data.datamodule``.
        brings_data: whether the data are those of the task or its data module.
        loggers: names of the classes of the run's loggers, also on a rank that has none.
        ckpt_path: the checkpoint that the run starts from, the newest of those it may be; ``None`` without one.
    """

    mode: str
    world: World
    trainer: TrainerSettings
    parallelism: StrategySettings
    devices: Sequence[torch.device]
    loaders: Mapping[str, Any]
    directory: Path
    sum: Callable[[Tensor], Tensor]
    first_on_node: Callable[[Callable[[], None]], None]
    total_steps_of: Callable[[int], int | None]
    datamodule: Any = None
    brings_data: bool = False
    loggers: Sequence[str] = ()
    ckpt_path: str | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> RunContext:
        """Return the context itself: a copy of a task is tried out in the same run, whose data are not copied."""
        return self

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps to the end of training; ``None`` if only time limits it, or nothing is trained."""
        return self.total_steps_of(len(self.loaders["train"])) if "train" in self.loaders else None


Surroundings = RunContext  # its former name, which is published


class StepOutput(NamedTuple):
    """The result of a step. A named tuple, so that ``DistributedDataParallel`` finds the tensors in it.

    Attributes:
        loss: scalar, the mean over the batch's samples; in an evaluation without a loss empty, shape [0].
        metrics: name to values. One value a sample, shape [n], is averaged over all samples of the data set, exactly; a
            scalar counts as the mean over ``weight`` samples.
        weight: number of samples, n; ``None``: those that the batch is made of, as where no tensor has a row for each.
        amount: what the loss is the mean over where that is not samples; scalar.
    """

    loss: Tensor
    metrics: Mapping[str, Tensor]
    weight: int | None
    amount: Tensor | None = None


class Position:
    """A point of the run: epoch and step.

    Attributes:
        step: the optimizer step that is being taken, or was taken last.
        batch, shard: the numbers of the batch that is being evaluated, in its data set, and of the part of it.
        indices: gives the numbers of its samples, int64 [n]; none where nothing is evaluated.
        seed: what is drawn for them follows from.
    """

    step = 0
    batch = shard = seed = 0

    def __init__(self) -> None:
        self.indices: Callable[[], Tensor] = partial(torch.empty, 0, dtype=torch.int64)


class Task(nn.Module):
    """A plain module with a loss and metrics. Subclass it where a step is more than ``loss(model(inputs), targets)``.

    Args:
        model: any module, ``inputs -> outputs``.
        loss: ``(outputs, targets) -> scalar``, the mean over the batch.
        metrics: name to ``(outputs, targets) -> [n]``, one value a sample, or to a torchmetrics ``Metric`` or
            ``MetricCollection``, whose metrics have their own names.
        train_metrics: whether to log them for training batches, too, at each line of the log.
        output: which one counts where the model returns several: a name in a mapping or a named tuple, or a place.
            Without it a mapping may have ``out`` alone, as torchvision's models for segmentation give it.
        mean_over: what the loss is the mean over. ``targets``: over those that are not ``ignore_index``, by their
            class's weight, as ``CrossEntropyLoss`` and ``NLLLoss`` take it; then batches, ranks and accumulated
            batches weigh as much as their targets, which takes one more exchange in a step. ``auto``: ``targets``
            where classes have weights, else ``samples``.

    Raises:
        RequestError: two metrics have one name, or ``mean_over`` does not go with the loss.

    Attributes:
        train_sums: of each metric the sum over the samples of a shard of the training batch, and their number, [2],
            while it is measured.
        logger: where the run's numbers go, e.g. ``self.logger.scalars({"train/gap": gap}, self.global_step)``; drops
            what it gets on all ranks but rank 0, and until training begins.
        position: where training is; no attribute of the module itself, which torch takes a microsecond to set.
    """

    logger = Logger()
    train_metrics = False
    train_sums: dict[str, Tensor] | None = None

    def __init__(
        self,
        model: nn.Module,
        loss: nn.Module,
        metrics: Mapping[str, Any] | None = None,
        train_metrics: bool = False,
        output: str | int | None = None,
        mean_over: str = "auto",
    ) -> None:
        super().__init__()
        for key, given in (("loss", loss), *((f"metrics.{name}", each) for name, each in _named(metrics).items())):
            if not (callable(given) or is_stateful(given)):
                raise RequestError(
                    f"task.{key}={given} cannot be called. Give the _target_ of what takes outputs and targets."
                )
        self.model = model
        self.loss = loss
        self.metrics: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = dict(metrics or {})
        for metric in self.metrics.values():
            if isinstance(metric, Accuracy):
                metric.last = self.classes_last
        self.train_metrics = train_metrics
        self.output = output
        if not isinstance(output, (str, int, type(None))):
            raise RequestError(f"task.output={output} is no name and no place. Give one, such as out or 0, or null.")
        self.position = Position()
        self._elementwise = isinstance(loss, _ELEMENTWISE)
        self._of_classes = isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss))
        self.weighs = self._weighs(mean_over)
        names = ["loss", *(_OF_THE_LOOP if train_metrics else ()), *self.metric_names]
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise RequestError(
                f"Two metrics are called {', '.join(twice)}: of task.metrics, of a collection there, or of the loop. "
                f"Give each a name of its own, in a MetricCollection e.g. by its prefix."
            )

    def _weighs(self, mean_over: str) -> bool:
        """Return whether batches weigh as much as their targets, not as their samples."""
        if mean_over not in ("auto", "samples", "targets"):
            raise RequestError(f"task.mean_over={mean_over} is not known. Allowed: auto, samples, targets.")
        means = self._of_classes and self.loss.reduction == "mean"
        if mean_over == "targets" and not means:
            raise RequestError(
                f"task.mean_over=targets, but task.loss is a {type(self.loss).__name__}: only of CrossEntropyLoss and "
                f"NLLLoss with reduction=mean is it known which targets count. Use task.mean_over=samples."
            )
        self._over_targets = mean_over == "targets" or (mean_over == "auto" and means and self.loss.weight is not None)
        self.undecided = self._over_targets and mean_over == "auto" and self._own_step
        return self._over_targets and not self.undecided

    @property
    def _own_step(self) -> bool:
        return type(self).training_step is not Task.training_step

    def amount(self, batch: Any) -> Tensor:
        """Return what the mean loss of a batch is a mean over, where :attr:`weighs` says that it is not samples."""
        return self._amount(_pair(batch)[1])

    def _amount(self, targets: Tensor) -> Tensor:
        if targets.is_floating_point():  # probabilities: each sample, or pixel, counts alike, as torch has it
            return torch.tensor(float(targets.numel() // targets.shape[1]), dtype=sum_dtype(targets.device))
        counted = targets != self.loss.ignore_index
        if self.loss.weight is None:
            return counted.sum(dtype=sum_dtype(targets.device))
        weights: Tensor = self.loss.weight.to(targets.device, sum_dtype(targets.device))  # type: ignore[assignment]
        return weights[targets[counted]].sum()

    def ignored(self, batch: Any) -> str:
        """Return the key to set where a batch has targets that do not count, and weighs as much as its samples."""
        if self.weighs or not self._of_classes or self._own_step:
            return ""
        targets = _pair(batch)[1]
        some = not targets.is_floating_point() and bool((targets == self.loss.ignore_index).any())
        return "task.mean_over=targets" if some else ""

    @property
    def global_step(self) -> int:
        """The optimizer step that is being taken, or was taken last."""
        return self.position.step

    def forward(self, batch: Any) -> StepOutput:
        """Run a training step: this is what the strategy's wrapper calls."""
        return output_of(self.training_step, batch)

    def training_step(self, batch: Any) -> StepOutput:
        """Return the mean loss of a batch; metrics are left to validation, but for ``train_metrics``."""
        inputs, targets = _pair(batch)
        return self.training_output(self.model(inputs), targets)

    def training_output(self, outputs: Any, targets: Tensor) -> StepOutput:
        """Return the loss of a training batch, with gradient, from what the model returned."""
        outputs = self.chosen(outputs)
        targets = targets.to(outputs.device)  # a model over several devices ends on its last
        if self.train_sums is not None:
            for name, value in self._measured(outputs.detach(), targets).items():
                self.train_sums[name] = self.train_sums.get(name, 0) + summed(value, len(targets))
        return StepOutput(self._loss(outputs, targets), {}, targets.shape[0])

    def validation_step(self, batch: Any) -> StepOutput:
        """Return loss and metrics of a batch. Called without gradients, on the bare module."""
        inputs, targets = _pair(batch)
        outputs = self.chosen(self.model(inputs))
        targets = targets.to(outputs.device)
        loss = self._loss(outputs, targets)
        amount = self._amount(targets) if self._over_targets else None
        return StepOutput(loss, self._measured(outputs, targets), targets.shape[0], amount)

    def chosen(self, returned: Any) -> Tensor:
        """Return the tensor that counts of what the model returned.

        Raises:
            RequestError: it is not known which.
        """
        if isinstance(returned, Tensor):
            return returned
        names = {**returned} if isinstance(returned, Mapping) else getattr(returned, "_asdict", dict)()
        places = dict(enumerate(returned)) if isinstance(returned, (tuple, list)) else {}
        output = "out" if self.output is None and [*names] == ["out"] else self.output
        found = {**places, **names}.get(output)
        if isinstance(found, Tensor):
            return found
        known = f" of {', '.join(map(str, names or places))}" if names or places else ""
        given = "null" if self.output is None else self.output
        raise RequestError(
            f"task.output={given}, but {type(self.model).__name__} returns a {type(returned).__name__}{known}: this "
            f"task computes the loss from one tensor. Set task.output to the one that counts; a loss of several takes "
            f"a task of your own, whose training_step and validation_step compute it."
        )

    def _measured(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Return the values of the metrics that give one a sample; update the others."""
        values = {}
        for name, metric in self.metrics.items():
            if isinstance(metric, nn.Module) or is_stateful(metric):
                metric.to(outputs.device)  # type: ignore[attr-defined]
            if is_stateful(metric):
                metric.update(outputs, targets)  # type: ignore[attr-defined]
            else:
                values[name] = of_samples(name, metric(outputs, targets), len(targets))
        return values

    def _loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss; refuse what torch would broadcast, and so compare each output with each target."""
        if self._elementwise and outputs.shape != targets.shape:
            raise RequestError(
                f"{type(self.loss).__name__} compares element by element, but the model's outputs are "
                f"{list(outputs.shape)} and the targets {list(targets.shape)}: torch would broadcast them. Give both "
                f"one shape, e.g. by targets of {list(outputs.shape)} in the data set."
            )
        if self._of_classes:
            self._check_classes(outputs, targets)
        return self.loss(outputs, targets)  # type: ignore[no-any-return]

    def _check_classes(self, outputs: Tensor, targets: Tensor) -> None:
        """Refuse targets that are no classes: with one output, cross-entropy is 0 whatever the model says."""
        classes = outputs.shape[1] if outputs.dim() > 1 else outputs.shape[0]
        probabilities = targets.is_floating_point() and targets.shape == outputs.shape
        if classes < 2 or (targets.is_floating_point() and not probabilities):
            raise RequestError(
                f"{type(self.loss).__name__} takes classes, int64 from 0 to one less than the model's outputs, or a "
                f"probability of each, but the outputs are {list(outputs.shape)} and the targets "
                f"{list(targets.shape)}, {targets.dtype}. For targets that are values choose task=regression."
            )
        weight = self.loss.weight
        if isinstance(weight, Tensor) and len(weight) != classes:
            raise RequestError(
                f"task.loss.weight has {len(weight)} weights, and the model {classes} outputs. Give one for each class."
            )

    def enter_training(self) -> None:
        """Put the model in training mode, but for parts of it that are in eval mode, which stay so.

        Its own ``train`` has the first word: what that leaves in eval mode, as statistics of a batch norm, stays there.
        One that is in eval mode as a whole, as Hugging Face's are when they are loaded, is put in training mode.
        """
        still = [each for each in self.modules() if not each.training] if self.model.training else []
        self.train()
        for each in still:
            each.training = False

    def enter_evaluation(self, split: str) -> None:
        """Put all in eval mode, for a split as in :meth:`start_evaluation`."""
        self._modes = Modes(self)
        self.eval()

    def leave_evaluation(self) -> None:
        """Put each module in the mode that it was in before an evaluation, if there was one."""
        if self._modes is not None:
            self._modes.restore()
        self._modes = None

    def start_evaluation(self, split: str, number: int) -> None:
        """Do what is due before a data set is evaluated; nothing here.

        Args:
            split: ``val``, ``test`` or ``predict``.
            number: of the set among those of its split.
        """

    def end_evaluation(self, split: str, metrics: dict[str, float]) -> dict[str, float]:
        """Return the metrics of all data sets of a split, once they are evaluated; a task may add to them."""
        return metrics

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Keep a step of an evaluation out of what metrics hold: its batch has no sample, and only its names count."""
        yield
        for metric in self.stateful_metrics.values():
            metric.reset()

    def everywhere(self, names: Sequence[str]) -> Sequence[str]:
        """Return the names of what was measured on any rank, in one order. A collective, if ranks may have others."""
        return names

    def metric_name(self, prefix: str, name: str) -> str:
        """Return what a metric of a step is logged as; ``prefix`` is ``val``, ``val/<name of the set>``, …"""
        return f"{prefix}/{name}"

    def test_step(self, batch: Any) -> StepOutput:
        """Return loss and metrics of a batch of ``mode=test``; as :meth:`validation_step`, unless overridden."""
        return self.validation_step(batch)

    def predict_step(self, batch: Any) -> Any:
        """Return the model's outputs; targets, where a batch has them, are ignored."""
        inputs = batch[0] if isinstance(batch, (tuple, list)) else batch
        try:
            outputs = self.model(inputs)
        except Exception as error:
            if self._own_step:
                error.add_note(
                    f"{type(self).__name__} has its own training_step and no predict_step, so the model was called "
                    f"with {'the first part of ' * (inputs is not batch)}a batch. Write predict_step(self, batch), "
                    f"which returns what is to be written."
                )
            raise
        return self.chosen(outputs)

    def in_words(self, predictions: Tensor) -> str | None:
        """Return what was predicted as text for ``predictions.txt``; ``None`` where there is none to read."""
        return None

    def configure_optimizers(self) -> OwnOptimizers | None:
        """Return the task's own optimizers and schedules, or ``None`` to leave both to the config."""
        return None

    def measures(self, name: str, epoch_is_over: bool) -> bool:
        """Whether training gives this metric a new value with this step. A collective where that is to be read."""
        return name.startswith("train/")

    is_altered = False  # whether the validation under way has other weights, so that it is to end before all is saved
    logged: Collection[str] = ()  # names that the task logs in training itself, which are not logged twice
    unlogged: Collection[str] = ()  # metrics of evaluations that loggers do not get
    weighs = False  # whether batches weigh as much as :meth:`amount` says, not as their samples
    undecided = False  # whether that is left open, for a step of its own whose loss may be another one
    classes_last = False  # whether classes are in the last dimension of outputs, not the second
    gathers_state = False  # whether its callbacks put their states together over ranks, by collectives
    names_metrics = False  # whether what a step measures has names of its own, which are known once it ran
    validates = True  # whether there is something to measure on validation sets

    _modes: Modes | None = None  # as they were before the evaluation that is under way

    steps: int | None = None  # optimizer steps, where the task takes them by itself: one of the loop may be several
    deferred = False  # whether large tensors are on meta until they are filled
    moves_batches = False  # to the device, in the place of their loaders
    accumulates = True  # whether an optimizer step may be one of several passes

    # Where a task takes optimizer steps by itself: as training.update.update does.
    update: Callable[[Any, Iterator[Any], bool], Any] | None = None

    def attach(self, context: RunContext) -> None:
        """Learn what run this is, once its model is made and before its weights are loaded."""

    def dataloaders(self, mode: str) -> Mapping[str, Any]:
        """Return ``DataLoader`` objects that the task brings, by split; for ``data=lightning``.

        Raises:
            RequestError: there are none.
        """
        raise RequestError("data=lightning takes the loaders of a LightningDataModule: it goes with task=lightning.")

    def callback(self, name: str, made: object) -> Any:
        """Return an object of the group callbacks that is no ``Callback`` as one; ``None`` if it is unknown."""
        return None

    def callbacks(self) -> Mapping[str, Any]:
        """Return ``Callback`` objects by name: what of the task itself follows the events of a run."""
        return {}

    def checkpoint(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a checkpoint holds of the task beside ``state``: tensors and plain data."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take what :meth:`checkpoint` returned from a checkpoint that training goes on from."""

    @property
    def called(self) -> Sequence[nn.Module]:
        """The modules that its steps call, as far as it knows them: those that ``trainer.compile`` has compiled."""
        return [self.model]

    @property
    def stateful_metrics(self) -> dict[str, Any]:
        """Metrics that accumulate over the data set and over ranks by themselves (torchmetrics)."""
        return {name: metric for name, metric in self.metrics.items() if is_stateful(metric)}

    @property
    def metric_names(self) -> list[str]:
        """Names of the metrics; each of a collection by its own name."""
        names = (each.keys() if hasattr(each, "keys") else [name] for name, each in self.metrics.items())
        return [name for of_one in names for name in of_one]

    def weights(self) -> dict[str, Tensor]:
        """Return the model state under the model's own names; what else the task holds is under ``task.``."""
        return {outside(name): value for name, value in self.state_dict().items()}

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Load what :meth:`weights` returned; names and shapes must match."""
        self.load_state_dict({name: weights[outside(name)] for name in self.state_dict()})


def output_of(step: Callable[[Any], StepOutput], batch: Any) -> StepOutput:
    """Return what a step of a task returns for a batch, as :func:`checked` does."""
    return checked(step(batch), step)


def checked(output: Any, step: Callable[..., Any]) -> StepOutput:
    """Return what a step of a task returned; a loss of one number is a scalar, as ``backward`` takes it.

    Raises:
        RequestError: it is none of what a step returns, but a loss alone, or nothing.
    """
    if isinstance(output, StepOutput) and isinstance(output.loss, Tensor):
        one = output.loss.dim() and output.loss.numel() == 1
        return output._replace(loss=output.loss.reshape(())) if one else output
    given = f"the loss as a {type(output.loss).__name__}" if isinstance(output, StepOutput) else type(output).__name__
    raise RequestError(
        f"{step.__qualname__} returns {given}. Return ddp_recipes.StepOutput(loss, metrics, samples): a tensor, a dict "
        f"(empty if there are none) and how many samples the batch has. self.training_output(outputs, targets) is one."
    )


def _named(metrics: Any) -> Mapping[str, Any]:
    if isinstance(metrics or {}, Mapping):
        return metrics or {}
    raise RequestError(f"task.metrics={metrics} is no section. Allowed: names of metrics, each with its _target_.")


def _pair(batch: Any) -> Any:
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        if hasattr(batch[1], "to"):  # a tensor, or what is like one
            return batch
        raise RequestError(
            f"The targets of a batch are a {type(batch[1]).__name__}, and this task takes a tensor. Give numbers in "
            f"the data set (of classes from 0 on), or bring your own task."
        )
    keys = f" with the keys {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else ""
    many = f" of {len(batch)}" if isinstance(batch, (tuple, list)) else ""
    raise RequestError(
        f"A batch is a {type(batch).__name__}{many}{keys}, and this task takes (inputs, targets). Give pairs in the "
        f"data set or by data.collate_fn, choose task=model_loss for a model that returns its loss, or bring your own "
        f"task."
    )


def outside(name: str) -> str:
    """Return the name under which :meth:`Task.weights` has a tensor of the task."""
    return name.removeprefix("model.") if name.startswith("model.") else f"task.{name}"


@dataclass
class Schedule:
    """A scheduler and its cadence.

    Attributes:
        interval: what one tick is: ``step`` or ``epoch``.
        frequency: it advances at each so many ticks, counted within an epoch where a tick is a step.
        monitor: the metric that it follows, once measured; ``None`` for one that follows from the number of ticks.
        strict: whether a metric that is not there ends the run; else it does not advance.
        advance: does so, given the scheduler and the metric.
        name: what its learning rate is called, where that is given.
    """

    scheduler: Any
    interval: str
    frequency: int = 1
    monitor: str | None = None
    strict: bool = True
    advance: Callable[[Any, float | None], None] | None = None
    name: str | None = None

    def tick(self, batch: int, epoch: int | None, metrics: Mapping[str, float] | None = None) -> None:
        """Advance after an optimizer step, if it is time.

        Args:
            batch: batches of the epoch that are done.
            epoch: epochs that are done, if this step ended one.
            metrics: the latest ones, for schedulers that follow one; ``None`` for all others.
        """
        number = batch if self.interval == "step" else epoch
        if number is None or (metrics is None) != (self.monitor is None) or number % self.frequency:
            return
        value = None
        if metrics is not None and self.monitor is not None and (value := metrics.get(self.monitor)) is None:
            if not self.strict:
                return
            raise RequestError(
                f"{type(self.scheduler).__name__} follows {self.monitor}, which is not measured. Measured are: "
                f"{', '.join(sorted(metrics)) or 'none so far'}. Choose one of what is, as its monitor."
            )
        if self.advance is not None:
            self.advance(self.scheduler, value)
        elif value is None:
            self.scheduler.step()
        else:
            self.scheduler.step(value)


class OwnOptimizers(NamedTuple):
    """Optimizers and schedules that a task brings itself; without a schedule the config's goes with the first one."""

    optimizers: Sequence[torch.optim.Optimizer]
    schedules: Sequence[Schedule]


class Modes:
    """The mode of a module and of all in it, as it is now: parts may be frozen, a batch norm or a teacher."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._training = {each: each.training for each in module.modules()}

    def restore(self) -> None:
        """Put it back. A module's own ``train`` is called first: it may do more than to set the mode."""
        self._module.train()
        for each, training in self._training.items():
            if each.training != training:
                each.training = training
