"""Parts of ``self.trainer``, and ``self.logger``: what modules and callbacks look up in them."""

from __future__ import annotations

import math
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from functools import cache, partial
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, SupportsFloat

import torch
from torch import Tensor

from ddp_recipes._compat.torch_ import tree_map_only
from ddp_recipes.checkpointing.files import BEST, INDEX, LAST, WHOLE
from ddp_recipes.data.keyed import to_device
from ddp_recipes.data.loader import Loader
from ddp_recipes.errors import RequestError
from ddp_recipes.loggers import Loggers
from ddp_recipes.strategies.base import by_rank
from ddp_recipes.strategies.collectives import broadcast
from ddp_recipes.tasks import RunContext, Task
from ddp_recipes.training.state import Run

if TYPE_CHECKING:
    from ddp_recipes.lightning.adapter import LightningTask
    from ddp_recipes.lightning.trainer import Trainer


_PACKAGES = ("lightning.pytorch.loggers", "pytorch_lightning.loggers")


class ModuleLogger:
    """What a module sees as ``self.logger``: a logger of the run by Lightning's names.

    It is an instance of Lightning's logger of the same name, for modules that ask before they log a picture. That is
    looked up where Lightning has been loaded, not loaded.

    Args:
        number: of the logger, among those of the run.
    """

    def __init__(self, trainer: Trainer, task: Task, number: int = 0) -> None:
        self._trainer, self._task, self._number = trainer, task, number

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.__class__, name, None) if name.startswith("log_") else None
        if method is not None:
            return partial(method, self)  # Lightning's own, such as W&B's log_image, which ends in log_metrics
        there = ", ".join(each for each in vars(ModuleLogger) if not each.startswith("_"))
        raise AttributeError(
            f"logger.{name} is not there under task=lightning. There are: {there}; experiment is the logger's own."
        )

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class of Lightning that it stands for, on all ranks."""
        context = vars(self._trainer).get("run_context")
        names = () if context is None else context.loggers
        loaded = tuple(package for package in _PACKAGES if package in sys.modules)
        return _class_of(names[self._number].lower(), loaded) if self._number < len(names) else ModuleLogger

    @property
    def _logger(self) -> Any:
        """Our logger, which drops all on other ranks than 0."""
        logger = self._task.logger
        return logger.loggers[self._number] if isinstance(logger, Loggers) else logger

    @property
    def experiment(self) -> Any:
        """The logger's own object, such as TensorBoard's ``SummaryWriter``; one that drops all on other ranks.

        Of one that has none, such as a CSV file, it is that of the first logger that has one.
        """
        if (kept := self._trainer.kept) is not None:
            return _Kept(kept, lambda: self.experiment)
        return self._logger.experiment or self._task.logger.experiment or _Dropping()

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log numbers at a step, the present one by default; at that what else W&B and its like take."""
        step = self._trainer.global_step if step is None else step
        if (kept := self._trainer.kept) is not None:
            kept.append(partial(self.log_metrics, dict(metrics), step))
            return
        media = {name: value for name, value in metrics.items() if not _is_number(value)}
        media = media if hasattr(self.experiment, "log") else {}
        values = {name: float(value) for name, value in metrics.items() if name not in media}
        if values:
            self._logger.scalars(values, step)
        if media:
            self.experiment.log(media, step=self._trainer.global_step)

    def log_hyperparams(self, params: Any, *_: Any, **__: Any) -> None:
        """Log them as a text: HParams shows those of the config."""
        if (kept := self._trainer.kept) is not None:
            kept.append(partial(self.log_hyperparams, deepcopy(params)))
            return
        given = vars(params) if isinstance(params, Namespace) else dict(params)
        lines = [f"- {name}: {value}" for name, value in given.items()]
        self._logger.text("hyper_parameters", "\n".join(lines))

    def log_graph(self, *_: Any, **__: Any) -> None:
        """``logger.graph=true`` does it."""

    def save(self) -> None:
        """Write out what is held back."""
        self._logger.flush()

    @property
    def save_dir(self) -> str:
        """The run directory."""
        return self._trainer.default_root_dir

    log_dir = root_dir = save_dir

    @property
    def name(self) -> str:
        return Path(self.save_dir).name

    @property
    def run_id(self) -> str | None:
        """The id of the run in a tracker that gives it one; ``None`` on other ranks than 0."""
        found = getattr(self._logger, "run_id", None) or getattr(self._logger.experiment, "id", None)
        return None if found is None else str(found)

    @property
    def version(self) -> str:
        """The same; empty where there is none."""
        return self.run_id or ""


def _is_number(value: Any) -> bool:
    return isinstance(value, SupportsFloat) and not isinstance(value, str)


@cache
def _class_of(name: str, packages: tuple[str, ...]) -> type:
    """Return Lightning's logger of that name, of all packages where there are two; ours where it has none."""
    classes = [
        each
        for package in packages
        for each in vars(sys.modules[package]).values()
        if isinstance(each, type) and each.__name__.lower() == name
    ]
    return classes[0] if len(classes) == 1 else type(name, tuple(classes), {}) if classes else ModuleLogger


class _Dropping:
    """Takes any call, also of what it is asked for, and does nothing."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self

    def __getitem__(self, key: Any) -> Any:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        """Drop it."""


class _Kept(_Dropping):
    """Keeps calls for an object that is not there yet, as a run's logger before its first look at validation is over.

    Args:
        found: gives the object.
    """

    def __init__(self, calls: list[Callable[[], object]], found: Callable[[], Any]) -> None:
        self._calls, self._found = calls, found

    def __getattr__(self, name: str) -> Any:
        return _Kept(self._calls, lambda: getattr(self._found(), name))

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self._calls.append(lambda: self._found()(*arguments, **options))
        return _Dropping()

    def __setitem__(self, key: Any, value: Any) -> None:
        self._calls.append(lambda: self._found().__setitem__(key, value))


_OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda every: every.sum(0),
    "product": lambda every: every.prod(0),
    "max": lambda every: every.amax(0),
    "min": lambda every: every.amin(0),
}


def unavailable(called: str, name: str, view: object) -> AttributeError:
    """Return the error of what a module asks of an object of Lightning and does not find here."""
    there = ", ".join(sorted(each for each in object.__dir__(view) if not each.startswith("_")))
    return AttributeError(f"{called}.{name} is not there under task=lightning. There are: {there}.")


class StrategyView:
    """What modules and callbacks ask of ``trainer.strategy``: exchanges between ranks, which all of them call."""

    handles_gradient_accumulation = False

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._context = trainer, trainer.run_context

    def __getattr__(self, name: str) -> Any:
        raise unavailable("trainer.strategy", name, self)

    @property
    def root_device(self) -> torch.device:
        """This rank's device, the first of several."""
        return self._context.devices[0]

    optimizers = property(attrgetter("_trainer.optimizers"))
    is_global_zero = property(attrgetter("_context.world.is_main"))
    global_rank = property(attrgetter("_context.world.rank"))
    local_rank = property(attrgetter("_context.world.local_rank"))
    world_size = property(attrgetter("_context.world.world_size"))

    def barrier(self, name: str | None = None) -> None:
        self.reduce_boolean_decision(True)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all ranks say so, or any of them."""
        said: int = self._by_rank("reduce_boolean_decision", torch.tensor(int(bool(decision)))).sum().item()  # type: ignore[assignment]
        return said == self.world_size if all else said > 0

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of rank ``src``: tensors and plain data, for nothing that a rank sends is unpickled."""
        if self.world_size == 1:
            return obj
        self._trainer.services.refuse_in_step("trainer.strategy.broadcast")
        return broadcast(obj, src)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Leave a tensor's mean, sum, … over ranks in it, and return it; other values as they are, as in Lightning.

        Raises:
            RequestError: for another operation.
        """
        operation = str(getattr(reduce_op, "name", reduce_op) or "mean").lower()
        mean = operation in ("mean", "avg")
        if not mean and operation not in _OPERATIONS:
            raise RequestError(
                f"trainer.strategy.reduce is given reduce_op={reduce_op}. Allowed: mean, {', '.join(_OPERATIONS)}."
            )
        if not isinstance(tensor, Tensor) or self.world_size == 1:
            return tensor
        every = self._by_rank("reduce", tensor.detach())
        tensor.data.copy_(_OPERATIONS["sum" if mean else operation](every))
        if not mean:
            return tensor
        return tensor.div_(self.world_size) if tensor.is_floating_point() else tensor.copy_(tensor / self.world_size)

    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Return a tensor of each rank, [ranks, ...]."""
        return self._trainer.services.all_gather(tensor, group, sync_grads)

    def batch_to_device(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        """Return a batch on this rank's device."""
        return to_device(batch, device or self.root_device)

    def _by_rank(self, called: str, value: Tensor) -> Tensor:
        self._trainer.services.refuse_in_step(f"trainer.strategy.{called}")
        return by_rank(value.to(self.root_device), self._context.world, self._context.sum)


class FitLoop:
    """What modules ask of ``trainer.fit_loop``."""

    _trainer: Trainer
    epoch_loop: EpochLoop

    def __init__(self, trainer: Trainer) -> None:
        vars(self).update(_trainer=trainer, epoch_loop=EpochLoop(trainer))

    def __getattr__(self, name: str) -> Any:
        raise unavailable("trainer.fit_loop", name, self)

    def __setattr__(self, name: str, value: Any) -> None:
        raise RequestError(
            f"{type(self._trainer.model).__name__} or a callback sets trainer.fit_loop.{name}, which reaches into "
            f"Lightning's own loop. Set what there is of it in the config: trainer.max_epochs, trainer.max_steps, …"
        )

    def setup_data(self) -> None:
        """Make loaders, which are there already."""

    total_batch_idx = property(attrgetter("epoch_loop.total_batch_idx"))
    max_epochs = property(attrgetter("_trainer.max_epochs"))


class EpochLoop:
    """What modules and callbacks ask of ``trainer.fit_loop.epoch_loop``.

    Attributes:
        batch_idx: the number of the latest batch in its epoch; -1 before the first one.
        epoch: which it is of.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.batch_idx, self.epoch = -1, 0

    def __getattr__(self, name: str) -> Any:
        raise unavailable("trainer.fit_loop.epoch_loop", name, self)

    global_step = property(attrgetter("_trainer.global_step"))

    @property
    def total_batch_idx(self) -> int:
        """The number of the batch, over all epochs.

        Raises:
            RequestError: an epoch has an unknown number of batches.
        """
        if math.isinf(batches := self._trainer.num_training_batches):
            raise RequestError(
                "trainer.fit_loop.total_batch_idx is asked for, and an epoch has an unknown number of batches. Use "
                "trainer.global_step, or set trainer.limit_train_batches."
            )
        return self.epoch * int(batches) + self.batch_idx

    @property
    def val_loop(self) -> Any:
        """Where modules ask, as GluonTS does in ``configure_optimizers``, whether there is anything to validate on."""
        return SimpleNamespace(
            _data_source=SimpleNamespace(is_defined=lambda: self._trainer.val_dataloaders is not None),
        )

    _batches_that_stepped = property(attrgetter("_trainer._step"))


class LoaderView:
    """This rank's batches of a data set, as a ``DataLoader`` gives them; training does not notice who iterates here."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self.dataset, self.collate_fn = loader.dataset, loader.collate_fn
        self.batch_size = -(-loader.plan.global_batch_size // loader.plan.num_shards)

    def __len__(self) -> int:
        if math.isinf(batches := self._loader.plan.planned_batches):
            raise TypeError(f"{type(self.dataset).__name__} has no length.")
        return int(batches)

    def __iter__(self) -> Iterator[Any]:
        apart = self._loader.apart()  # the run's may be in the middle of an epoch
        return (batch.data for batch in apart.batches(epoch=0) if batch.num_samples)


class InShards:
    """A batch that is computed in shards, or its output, as hooks get it: no rank has the whole, which is said on use.

    Attributes:
        samples: of the batch.
    """

    def __init__(self, task: LightningTask, number: int) -> None:
        assert task.trainer.run is not None
        self._task, self.samples = task, task.trainer.run.train.plan.size(number)

    def _look(self, *_: Any) -> Any:
        context, hook = self._task.trainer.run_context.parallelism, self._task.hooks.current
        raise RequestError(
            f"{hook} of {type(self._task.model).__name__} or of a callback looks at its batch or outputs, and with "
            f"strategy={context.name} a batch is computed in {context.fixed_shards} shards, so that no rank has the "
            f"whole. Look at it in training_step, for each shard, or choose a strategy without shards, as ddp."
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._look()

    __getitem__ = __iter__ = __len__ = __contains__ = _look


class Checkpoints:
    """The run's checkpoints by the names of Lightning's ``ModelCheckpoint``."""

    def __init__(self, run: Run, context: RunContext) -> None:
        self.monitor, self.mode, self.save_top_k = run.monitor, run.checkpoint.mode, run.checkpoint.save_top_k
        self.dirpath = str(context.directory / "checkpoints")
        suffix = INDEX if run.strategy.settings.kind == "sharded" else WHOLE
        values = [value for value in run.values.values() if not math.isnan(value)]
        best = (max if self.mode == "max" else min)(values, default=None)
        self.best_model_score = None if best is None else torch.tensor(best)
        self.best_model_path = "" if best is None else str(Path(self.dirpath, BEST + suffix))
        self.last_model_path = str(Path(self.dirpath, LAST + suffix)) if run.good_step > 0 else ""


class Metrics(dict[str, Tensor]):
    """Metrics by name; what is put there is given to ``measured`` as well."""

    def __init__(self, values: Mapping[str, Tensor], measured: Callable[[Mapping[str, float]], None]) -> None:
        super().__init__(values)
        self._measured = measured

    def __setitem__(self, name: str, value: Any) -> None:
        self.update({name: value})

    def update(self, *arguments: Any, **more: Any) -> None:
        values = dict(*arguments, **more)
        super().update(values)
        self._measured({name: float(value) for name, value in values.items()})


class PredictLoop:
    """What a ``BasePredictionWriter`` of Lightning asks of ``trainer.predict_loop``.

    Attributes:
        current_batch_indices: the numbers of the batch's samples in the data set.
        epoch_batch_indices, predictions: of all batches of this rank, where a callback writes them at the end.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.current_batch_indices: list[int] = []
        self.epoch_batch_indices: list[list[list[int]]] = [[]]
        self.predictions: list[Any] = []

    def _writers(self, interval: str) -> bool:
        return any(getattr(getattr(each, "interval", None), interval, False) for each in self._trainer.callbacks)

    def begin(self, indices: Callable[[], Tensor]) -> None:
        """Begin a batch with these samples."""
        if self._writers("on_batch") or self._writers("on_epoch"):
            self.current_batch_indices = indices().tolist()

    def keep(self, output: Any) -> None:
        """Keep a batch's predictions, if they are asked for at the end."""
        if self._writers("on_epoch"):
            self.epoch_batch_indices[0].append(self.current_batch_indices)
            self.predictions.append(tree_map_only(Tensor, Tensor.cpu, output))
