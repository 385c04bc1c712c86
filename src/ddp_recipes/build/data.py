"""Loaders of the config's data sets."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ddp_recipes.build.dataloaders import Source, by_name, function_of, source_of, source_of_node
from ddp_recipes.config.parallelism import BatchShards, StrategySettings
from ddp_recipes.config.settings import DataSettings, TrainerSettings, batches
from ddp_recipes.data.batch_plan import BatchPlan
from ddp_recipes.data.collate import Form
from ddp_recipes.data.loader import Loader, is_iterable, size_of
from ddp_recipes.data.order import Drawn, Order, order_of
from ddp_recipes.errors import RequestError
from ddp_recipes.runtime.world import World
from ddp_recipes.training.precision import whole_dtype

SPLITS = {
    "fit": ("train", "val"),
    "validate": ("val",),
    "test": ("test",),
    "predict": ("predict", "test", "val"),
    "export": (),
}


@dataclass(frozen=True)
class Loading:
    """What a run's loaders are made by.

    Attributes:
        data: the config's section.
        shards: those of each global batch that this rank trains on.
        evaluation_shards: those of any other split.
        replicas_a_shard: replicas that share one; ``batch_size`` is for each of them.
        timeout_s: for a batch from data workers.
        work: what is to be done: the mode, or what takes its place.
        sum: the strategy's, over rows and ranks; a collective.
    """

    data: Mapping[str, Any]
    settings: DataSettings
    trainer: TrainerSettings
    mode: str
    seed: int
    shards: BatchShards
    evaluation_shards: BatchShards
    replicas_a_shard: int
    device: torch.device
    timeout_s: float
    work: str
    world: World
    parallelism: StrategySettings
    sum: Callable[[torch.Tensor], torch.Tensor]

    def loaders(self, own: Mapping[str, Any] | None = None) -> dict[str, Loader]:
        """Return the loaders that the mode needs, by split, of several sets of one split by ``val/<name>``.

        Validation may be missing in ``fit``.

        Args:
            own: ``DataLoader`` objects that the task brings, by split, instead of the sets of the config.

        Raises:
            RequestError: the data have no split for the mode, or cannot be cut into such batches.
        """
        nodes = self._nodes(own)
        loaders = {name: self._loader(name, self._source(name, node, own), own is not None) for name, node in nodes}
        if self.trainer.overfit_batches and self.mode == "fit" and own is None:
            return dict.fromkeys(loaders, loaders["train"])
        return loaders

    def _nodes(self, own: Mapping[str, Any] | None) -> list[tuple[str, Any]]:
        """Return what the loaders are made of, with their names."""
        names, mode = SPLITS[self.mode], self.mode
        given = self.data if own is None else own
        found = [name for name in names if given.get(name) is not None]
        if names and (not found or (mode == "fit" and "train" not in found)):
            needed = " or ".join(f"data.{name}" for name in (names[:1] if mode == "fit" else names))
            raise RequestError(
                f"mode={mode} needs {needed}, which this data choice does not have. Give it in the data yaml, or "
                f"choose another data or mode."
            )
        chosen, sets = found if mode == "fit" else found[:1], _sets if own is None else by_name
        nodes = [each for split in chosen for each in sets(split, given[split])]
        if mode == "predict" and len(nodes) > 1:
            raise RequestError(
                f"mode=predict writes the outputs for one data set, and {found[0]} has several: "
                f"{', '.join(name for name, _ in nodes)}. Give the one to predict as data.predict."
            )
        return nodes

    def _source(self, name: str, node: Any, own: Mapping[str, Any] | None) -> Source:
        if own is None:
            return source_of_node(f"data.{name.replace('/', '.')}", node, self.settings, self._shards(name))
        return source_of(name, node, self.settings, self.shards.total * self.replicas_a_shard)

    def _loader(self, name: str, source: Source, own: bool) -> Loader:
        """Return the loader of a split; of ``own`` loaders of the task it has what they mean in Lightning."""
        dataset, settings, trainer = source.dataset, source.settings, self.trainer
        split, shards = split_of(name), self._shards(name)
        training = split == "train"
        if is_iterable(dataset):
            from ddp_recipes.build.iterables import iterable_loader

            return iterable_loader(self, name, source, shards, self._global_batch(settings, shards, training), own)
        if training and settings.shard_arguments is not None:
            raise RequestError(
                f"data.shard_arguments says how a stream is dealt to ranks, and data.train is a "
                f"{type(dataset).__name__} with an index, of which each rank takes its samples anyhow. Leave it out."
            )
        plan = BatchPlan(
            order=_order(dataset, settings, trainer, self.seed, training),
            global_batch_size=self._global_batch(settings, shards, training),
            num_shards=shards.total,
            seed=self.seed,
            drop_last=settings.drop_last and (training or own),
            sharding=settings.shard,
        )
        limit = getattr(trainer, f"limit_{split}_batches")
        if own and split == "val":
            limit = trainer.overfit_batches or limit
        return Loader(
            dataset,
            plan.limited(batches(limit, plan.num_batches)),
            self.device,
            shards=shards.numbers,
            num_workers=settings.num_workers,
            pin_memory=settings.pin_memory,
            collate_fn=source.collate(),
            persistent_workers=settings.persistent_workers,
            prefetch_factor=settings.prefetch_factor,
            timeout_s=self.timeout_s,
            form=Form(whole_dtype(trainer.precision), trainer.channels_last),
            name=f"data.{name.replace('/', '.')}",
        )

    def _shards(self, name: str) -> BatchShards:
        return self.shards if name == "train" else self.evaluation_shards

    def _global_batch(self, settings: DataSettings, shards: BatchShards, training: bool) -> int:
        """Return the samples of a global batch."""
        replicas = shards.total * self.replicas_a_shard
        if not training:
            return settings.val_batch_size * replicas
        global_batch = settings.global_batch_size or settings.batch_size * replicas
        if global_batch < replicas:
            raise RequestError(
                f"data.global_batch_size={global_batch} is less than one sample for each of {replicas} replicas. "
                f"Use at least {replicas}, or fewer {'processes' if shards.count == 1 else 'shards'}."
            )
        return global_batch


def split_of(name: str) -> str:
    """Return the split of a loader: ``val`` of ``val/clean``."""
    return name.partition("/")[0]


def _sets(split: str, node: Any) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the data sets of a split: one, or several with their names."""
    if not isinstance(node, Mapping):
        raise RequestError(f"data.{split}={node} is no data set: give a _target_ with its arguments, or null.")
    if "_target_" in node or not node or not all(isinstance(each, Mapping) for each in node.values()):
        return [(split, node)]  # without a _target_ it is refused where it is made
    if split == "train":
        raise RequestError(
            f"data.train has no _target_, but {', '.join(node)}: one set is trained on. Give one, e.g. a "
            f"torch.utils.data.ConcatDataset of them."
        )
    return [(f"{split}/{name}", each) for name, each in node.items()]


def _order(dataset: Any, settings: DataSettings, trainer: TrainerSettings, seed: int, training: bool) -> Order:
    """Return the order of a data set's samples; it may bring its own."""
    size_of(dataset)  # refuses what has no length
    if training and settings.weights is not None:
        return Drawn(_weights(settings.weights, dataset, trainer), seed)
    return order_of(dataset, seed, training and settings.shuffle and not trainer.overfit_batches)


def _weights(given: Any, dataset: Any, trainer: TrainerSettings) -> NDArray[np.float64]:
    """Return a weight for each sample, as the config gives it."""
    if trainer.overfit_batches:
        raise RequestError("data.weights draws samples, trainer.overfit_batches repeats the first: leave out one.")
    found, shown = given, f"data.weights={given}"
    if isinstance(given, str) and "." not in given:
        if not hasattr(dataset, given):
            raise RequestError(
                f"{shown}, but data.train, a {type(dataset).__name__}, has no attribute {given}. Name one that has a "
                f"weight for each sample, or a function of the data set by its dotted name."
            )
        found = getattr(dataset, given)
    elif not isinstance(given, list):
        found = function_of(given, "data.weights")(dataset)
    try:
        weights = np.asarray(found, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise RequestError(f"{shown} gives what is not numeric: {error}. Give a number for each sample.") from error
    needed = f"Needed: one for each of {len(dataset)} samples, at least 0, finite, not all 0."
    if weights.shape != (len(dataset),):
        raise RequestError(f"{shown} gives weights of the shape {list(weights.shape)}. {needed}")
    if not np.isfinite(weights).all() or weights.min() < 0 or not weights.any():
        raise RequestError(f"{shown} gives weights from {weights.min():g} to {weights.max():g}. {needed}")
    return weights
