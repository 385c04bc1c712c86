"""Loaders of the config's data sets."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from ddp_recipes.build.devices import Devices
from ddp_recipes.build.instantiate import bound, locate, make, parameters_of
from ddp_recipes.config.extras import extra
from ddp_recipes.config.parallelism import BatchShards
from ddp_recipes.config.request import Request
from ddp_recipes.config.settings import DataSettings, TrainerSettings, batches
from ddp_recipes.data.keyed import Form, gives_batches
from ddp_recipes.data.loader import Loader, is_iterable, size_of
from ddp_recipes.data.order import BatchPlan, Bucketed, Drawn, FirstEpoch, Order, order_of
from ddp_recipes.errors import RequestError
from ddp_recipes.strategies import Strategy
from ddp_recipes.training.precision import whole_dtype

_BUCKET = 64  # batches whose samples are sorted by length together
SPLITS = {
    "fit": ("train", "val"),
    "validate": ("val",),
    "test": ("test",),
    "predict": ("predict", "test", "val"),
    "export": (),
}


class Source(NamedTuple):
    """A data set, how it is cut into batches, and what makes a batch of its samples, where that is an object.

    Attributes:
        sampler, batch_sampler: of the user's own, in place of an order.
        parts: of a set whose batches are put together of those of several.
        shortest: whether an epoch ends with the shortest of these.
    """

    dataset: Any
    settings: DataSettings
    collate_fn: Callable[[list[Any]], Any] | None = None
    batched: bool = False  # whether the set gives whole batches, which nobody else cuts
    begin_worker: Callable[[int], None] | None = None  # in each data worker
    sampler: Any = None
    batch_sampler: Any = None
    parts: "Mapping[str, Source]" = MappingProxyType({})
    shortest: bool = False

    def collate(self) -> Callable[[list[Any]], Any] | None:
        """Return what makes a batch of samples, where that is a function of the user's own."""
        given = self.settings.collate_fn
        return self.collate_fn if given is None else function_of(given, "data.collate_fn")


@dataclass(frozen=True)
class Loading:
    """What a run's loaders are made by; ``data`` is the config's section."""

    data: Mapping[str, Any]
    request: Request
    devices: Devices
    strategy: Strategy

    @cached_property
    def trainer(self) -> TrainerSettings:
        """Its keys as ``fast_dev_run`` and ``overfit_batches`` change them."""
        return self.request.trainer.effective()

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
        if self.trainer.overfit_batches and self.request.run.mode == "fit" and own is None:
            train = loaders["train"]  # a validation in the middle of an epoch must not read on in its data workers
            return {name: train if name == "train" else train.apart() for name in loaders}
        return loaders

    def _nodes(self, own: Mapping[str, Any] | None) -> list[tuple[str, Any]]:
        """Return what the loaders are made of, with their names."""
        names, mode = SPLITS[self.request.run.mode], self.request.run.mode
        if mode == "fit" and self.trainer.limit_val_batches == 0:
            names = ("train",)
        given = self.data if own is None else own
        by_config = ("weights", "sampler", "batch_sampler", "group_by_length")
        if own is not None and (key := next((each for each in by_config if getattr(self.request.data, each)), None)):
            raise RequestError(
                f"data.{key} says which samples come, and the task brings loaders that say so themselves. Leave it "
                f"out, and give it to their DataLoader."
            )
        found = [name for name in names if given.get(name) is not None]
        if names and (not found or (mode == "fit" and "train" not in found)):
            needed = " or ".join(f"data.{name}" for name in (names[:1] if mode == "fit" else names))
            raise RequestError(
                f"mode={mode} needs {needed}, which this data choice does not have. Give it in the data yaml, or "
                f"choose another data or mode."
            )
        sets: Callable[[str, Any], Sequence[tuple[str, Any]]] = _sets if own is None else extra("data.datamodule")
        nodes = [each for split in (found if mode == "fit" else found[:1]) for each in sets(split, given[split])]
        if mode == "predict" and len(nodes) > 1:
            instead = "Give the one to predict as data.predict" if own is None else "Return one loader for it"
            raise RequestError(
                f"mode=predict writes the outputs for one data set, and {found[0]} has several: "
                f"{', '.join(name for name, _ in nodes)}. {instead}."
            )
        return nodes

    def _source(self, name: str, node: Any, own: Mapping[str, Any] | None) -> Source:
        if own is None:
            return source_of_node(f"data.{name.replace('/', '.')}", node, self.request.data, self._shards(name))
        replicas = self._replicas(self._shards("train"))
        found: Source = extra("a DataLoader of the task")(name, node, self.request.data, replicas)
        return found

    def _loader(self, name: str, source: Source, own: bool) -> Loader:
        """Return the loader of a split; of ``own`` loaders of the task it has what they mean in Lightning."""
        dataset, settings, trainer = source.dataset, source.settings, self.trainer
        split, shards = split_of(name), self._shards(name)
        training = split == "train"
        if is_iterable(dataset):
            global_batch = self._global_batch(settings, shards, training)
            loader: Loader = extra("an IterableDataset")(self, name, source, shards, global_batch, own)
            return loader
        if training and settings.shard_arguments is not None:
            raise RequestError(
                f"data.shard_arguments says how a stream is dealt to ranks, and data.train is a "
                f"{type(dataset).__name__} with an index, of which each rank takes its samples anyhow. Leave it out."
            )
        plan = self._plan(source, shards, training, own)
        limit = getattr(trainer, f"limit_{split}_batches")
        if own and split == "val":
            limit = trainer.overfit_batches or limit
        return Loader(
            dataset,
            plan.limited(batches(limit, plan.num_batches)),
            self.devices.own[0],
            shards=shards.numbers,
            num_workers=settings.num_workers,
            pin_memory=settings.pin_memory,
            collate_fn=source.collate(),
            persistent_workers=settings.persistent_workers,
            prefetch_factor=settings.prefetch_factor,
            multiprocessing_context=settings.multiprocessing_context,
            timeout=settings.timeout or 0.0,
            timeout_s=self.request.launcher.timeout_s,
            begin_worker=source.begin_worker,
            form=Form(whole_dtype(trainer.precision), trainer.channels_last),
            name=f"data.{name.replace('/', '.')}",
        )

    def _plan(self, source: Source, shards: BatchShards, training: bool, own: bool) -> BatchPlan:
        """Return which samples are in each batch of a split."""
        if (source.parts or source.batch_sampler is not None) and self.request.run.work in ("plan", "batch_size"):
            raise RequestError(
                "plan=true and tune=batch_size cut batches anew: leave out the batch sampler, or train on one loader."
            )
        if source.parts:
            plans = {name: self._plan(part, shards, training, own) for name, part in source.parts.items()}
            together: BatchPlan = extra("several loaders")(plans, source.dataset, source.shortest)
            return together
        settings, repeating = source.settings, bool(training and self.trainer.overfit_batches)
        size = self._global_batch(settings, shards, training)
        plan = BatchPlan(
            order=self._order(source, size, training),
            global_batch_size=size,
            num_shards=shards.total,
            seed=self.request.run.seed,
            drop_last=settings.drop_last and (training or own),
            sharding=settings.shard,
        )
        if source.batch_sampler is None:
            return replace(plan, order=FirstEpoch(plan.order)) if repeating else plan
        made: BatchPlan = extra("data.batch_sampler")(source.batch_sampler, source.dataset, plan, repeating)
        return made

    def _order(self, source: Source, size: int, training: bool) -> Order:
        """Return the order of a data set's samples; it may bring its own."""
        dataset, settings, seed = source.dataset, source.settings, self.request.run.seed
        size_of(dataset)  # refuses what has no length
        order = order_of(dataset, seed, training and settings.shuffle and not self.trainer.overfit_batches)
        if source.sampler is not None:
            order = extra("data.sampler")(source.sampler, dataset, seed)
        elif training and settings.weights is not None:
            if order.repeats:
                raise RequestError(
                    f"data.weights draws samples, and data.train, a {type(dataset).__name__}, draws them by its own "
                    f"weights. Leave out one."
                )
            if self.trainer.overfit_batches:
                raise RequestError(
                    "data.weights draws samples, trainer.overfit_batches repeats the first: leave out one."
                )
            order = Drawn(_numbers(settings.weights, "weights", "weight", dataset), seed)
        if training and settings.group_by_length and not self.trainer.overfit_batches:
            given = "lengths" if settings.group_by_length is True else settings.group_by_length
            lengths = _numbers(given, "group_by_length", "length", dataset).astype(np.int64)
            order = Bucketed(order, lengths, size, _BUCKET * size, seed)
        if isinstance(order, Bucketed) and order.batch != size:
            raise RequestError(
                f"data.train, a {type(dataset).__name__}, has batches of batch={order.batch} samples, and a global "
                f"batch has {size}: batches would be put together of several lengths. Set one as the other, or leave "
                f"the set as it is and set data.group_by_length."
            )
        return order

    def _shards(self, name: str) -> BatchShards:
        """Return the shards of each global batch of a split that this rank has."""
        strategy = self.request.strategy
        return (strategy.batch_shards if name == "train" else strategy.evaluation_shards)(self.devices.world)

    def _replicas(self, shards: BatchShards) -> int:
        """Return how many replicas there are, of which several may share a shard: ``batch_size`` is for each."""
        return shards.total * self.strategy.replicas(self.devices.own[0].type)

    def _global_batch(self, settings: DataSettings, shards: BatchShards, training: bool) -> int:
        """Return the samples of a global batch."""
        replicas = self._replicas(shards)
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


def _numbers(given: Any, name: str, what: str, dataset: Any) -> NDArray[np.float64]:
    """Return a number for each sample: of a list, of an attribute of the data set, or of a function of it."""
    found, shown = given, f"data.{name}={given}"
    if isinstance(given, str) and "." not in given:
        if not hasattr(dataset, given):
            raise RequestError(
                f"{shown}, but data.train, a {type(dataset).__name__}, has no attribute {given}. Name one that has a "
                f"{what} for each sample, or a function of the data set by its dotted name."
            )
        found = getattr(dataset, given)
    elif not isinstance(given, list):
        found = function_of(given, f"data.{name}")(dataset)
    try:
        numbers = np.asarray(found, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise RequestError(f"{shown} gives what is not numeric: {error}. Give a number for each sample.") from error
    needed = f"Needed: one for each of {len(dataset)} samples, at least 0, finite, not all 0."
    if numbers.shape != (len(dataset),):
        raise RequestError(f"{shown} gives {what}s of the shape {list(numbers.shape)}. {needed}")
    if not np.isfinite(numbers).all() or numbers.min() < 0 or not numbers.any():
        raise RequestError(f"{shown} gives {what}s from {numbers.min():g} to {numbers.max():g}. {needed}")
    return numbers


def source_of_node(key: str, node: Mapping[str, Any], settings: DataSettings, shards: BatchShards) -> Source:
    """Return the source of a config's set, which is told its shard as ``data.shard_arguments`` say."""
    given = settings.shard_arguments
    arguments = filled(given, shards) if isinstance(given, dict) and "_method_" not in given else {}
    taken = {*parameters_of(str(node.get("_target_")), key)} if arguments else set()
    if not {*arguments} <= taken:
        if key == "data.train":
            raise RequestError(
                f"data.shard_arguments names {', '.join(arguments)}, and {node.get('_target_')} ({key}) takes "
                f"{', '.join(sorted(taken))}. Name its own arguments, or a method of it by _method_."
            )
        arguments, settings = {}, replace(settings, shard_arguments=None)  # a share of the stream
    dataset = make({**node, **arguments}, key)
    if isinstance(dataset, DataLoader):
        raise RequestError(
            f"{key} is a DataLoader, whose batches are made already. Give its data set: batch_size, shuffle, sampler, "
            f"collate_fn, num_workers and the like are keys of data."
        )
    if arguments and not is_iterable(dataset):
        raise RequestError(
            f"data.shard_arguments deals iterable-style sets, and {key} is a {type(dataset).__name__} with an index, "
            f"of which each rank takes its samples anyhow. Leave it out."
        )
    own = {}
    if key == "data.train" and not is_iterable(dataset):
        nodes = {name: getattr(settings, name) for name in ("sampler", "batch_sampler")}
        own = {name: sampler_of(given, f"data.{name}", dataset) for name, given in nodes.items() if given}
    return Source(dataset, settings, None, gives_batches(dataset), **own)


def sampler_of(node: Mapping[str, Any], key: str, dataset: Any) -> Any:
    """Return the sampler that a node makes; the first argument that it needs and the node does not give is the set."""
    needed = [
        name
        for name, each in parameters_of(str(node.get("_target_")), key).items()
        if each.default is each.empty and each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
    ]
    missing = [name for name in needed if name not in node][:1]
    made = make(node, key, **dict.fromkeys(missing, dataset))
    if not hasattr(made, "__iter__"):
        raise RequestError(f"{key} makes a {type(made).__name__}, which has no __iter__. Give a torch Sampler.")
    return made


def function_of(node: str | Mapping[str, Any], key: str) -> Any:
    """Return what is to be called: named by its dotted name, made by a node, or bound to a node's arguments."""
    if isinstance(node, str):
        found = locate(node, key)
    elif node.get("_partial_"):
        found = bound(node, key)
    else:
        found = make(node, key)
    if not callable(found):
        raise RequestError(f"{key} makes a {type(found).__name__}, which cannot be called. Give a function.")
    return found


def filled(given: Mapping[str, str], shards: BatchShards) -> dict[str, int]:
    """Return arguments with the numbers that ``world`` and ``rank`` stand for."""
    numbers = {"world": shards.readers, "rank": shards.first}
    return {name: numbers[value] for name, value in given.items() if value in numbers and name != "_method_"}
