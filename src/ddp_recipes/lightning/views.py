"""Parts of ``self.trainer``: what modules and callbacks look up in them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ddp_recipes._compat.torch_ import tree_map_only
from ddp_recipes.checkpointing.files import BEST, INDEX, LAST, WHOLE
from ddp_recipes.data.loader import Loader
from ddp_recipes.errors import RequestError
from ddp_recipes.tasks import RunContext
from ddp_recipes.training.state import Run

if TYPE_CHECKING:
    from ddp_recipes.lightning.adapter import LightningTask
    from ddp_recipes.lightning.trainer import Trainer


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
            f"whole. Look at it in training_step, for each shard, or choose strategy=ddp."
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
