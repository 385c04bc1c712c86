"""What a torch ``DataLoader`` that a user brings says of its data set and its batches."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
    default_collate,
    default_convert,
)

from ddp_recipes.build.instantiate import bound, locate, make, parameters_of
from ddp_recipes.config.parallelism import BatchShards
from ddp_recipes.config.settings import DataSettings
from ddp_recipes.data.loader import is_iterable
from ddp_recipes.errors import RequestError


class Source(NamedTuple):
    """A data set, how it is cut into batches, and what makes a batch of its samples, where that is an object.

    Attributes:
        sampler, batch_sampler: of the user's own, in place of an order.
    """

    dataset: Any
    settings: DataSettings
    collate_fn: Callable[[list[Any]], Any] | None = None
    batched: bool = False  # whether the set gives whole batches, which nobody else cuts
    begin_worker: Callable[[int], None] | None = None  # in each data worker of a set that is read as a stream
    sampler: Any = None
    batch_sampler: Any = None

    def collate(self) -> Callable[[list[Any]], Any] | None:
        """Return what makes a batch of samples, where that is a function of the user's own."""
        given = self.settings.collate_fn
        return self.collate_fn if given is None else function_of(given, "data.collate_fn")


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


def by_name(split: str, made: Any) -> list[tuple[str, Any]]:
    """Return what a hook returned for a split: one loader, or several with their names or numbers.

    Raises:
        RequestError: several are to be trained on, of which Lightning puts together the batches.
    """
    if isinstance(made, (list, tuple)) and len(made) == 1:
        return [(split, made[0])]
    if split == "train" and isinstance(made, (list, tuple, Mapping)):
        raise RequestError(
            f"train_dataloader returns a {type(made).__name__} of {len(made)} loaders, whose batches would come "
            f"together. Every sample counts once, so one data set is trained on: return one DataLoader, e.g. of a "
            f"torch.utils.data.StackDataset, whose samples are dicts of theirs."
        )
    if isinstance(made, (list, tuple)):
        made = dict(enumerate(made))
    if isinstance(made, Mapping):
        return [(f"{split}/{name}", loader) for name, loader in made.items()]
    return [(split, made)]


def source_of(name: str, loader: Any, settings: DataSettings, replicas: int) -> Source:
    """Return the source of a loader: an order that is computed from the seed, or a sampler of its own.

    Args:
        replicas: over which a global batch is dealt; the loader's ``batch_size`` is for each of them.

    Raises:
        RequestError: it is no ``DataLoader``, or deals its samples to ranks itself.
    """
    if not isinstance(loader, DataLoader):
        raise RequestError(f"The loader for {name} is a {type(loader).__name__}. Allowed: torch.utils.data.DataLoader.")
    if is_iterable(loader.dataset):
        return _of_stream(loader, settings, replicas)
    sampler, batch_sampler = loader.sampler, loader.batch_sampler
    if batch_sampler is None:
        raise RequestError(
            f"The DataLoader for {name} has batch_size=None, and its data set gives samples by number. Give it a "
            f"batch_size, or a batch_sampler."
        )
    if loader.worker_init_fn is not None:
        raise RequestError(
            f"The DataLoader for {name} has a worker_init_fn, which is not called: what a sample draws at random "
            f"follows from the seed, the epoch and its number. Leave it out."
        )
    if isinstance(sampler, DistributedSampler):
        raise RequestError(
            f"The DataLoader for {name} has a DistributedSampler, and batches are dealt to ranks already: each would "
            f"get a part of a part. Use shuffle=True or False in its place."
        )
    weights: list[float] | None = None
    own: dict[str, Any] = {}
    if type(batch_sampler) is not BatchSampler:
        own = {"batch_sampler": batch_sampler}
    elif type(sampler) is WeightedRandomSampler and sampler.replacement and sampler.num_samples == len(loader.dataset):  # type: ignore[arg-type]
        weights = sampler.weights.tolist()
    elif not (type(sampler) is SequentialSampler or _shuffles(sampler, loader.dataset)):
        own = {"sampler": sampler}
    settings = replace(
        _settings(loader, settings, replicas), shuffle=type(sampler) is not SequentialSampler, weights=weights
    )
    return Source(loader.dataset, settings, None if loader.collate_fn is default_collate else loader.collate_fn, **own)


def _shuffles(sampler: Any, dataset: Any) -> bool:
    """Whether a sampler gives each sample once, in any order."""
    return type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(dataset)


def _of_stream(loader: "DataLoader[Any]", settings: DataSettings, replicas: int) -> Source:
    """Return the source of a loader of an iterable-style set."""
    collate_fn = None if loader.collate_fn in (default_collate, default_convert) else loader.collate_fn
    own, batched = _settings(loader, settings, replicas), loader.batch_size is None
    if batched and collate_fn is not None:
        raise RequestError(
            f"A DataLoader of {type(loader.dataset).__name__} has batch_size=None, so it gives whole batches, and a "
            f"collate_fn besides. Do the same in the set's __iter__."
        )
    return Source(loader.dataset, own, collate_fn, batched, loader.worker_init_fn)


def _settings(loader: "DataLoader[Any]", settings: DataSettings, replicas: int) -> DataSettings:
    """Return the settings that are the loader's own."""
    size = loader.batch_size or 1
    return replace(
        settings,
        batch_size=size,
        val_batch_size=size if settings.global_batch_size is None else max(1, size // replicas),
        drop_last=loader.drop_last,
        num_workers=loader.num_workers,
        persistent_workers=loader.persistent_workers or None,
        prefetch_factor=loader.prefetch_factor if loader.num_workers else None,
        pin_memory=loader.pin_memory,
        collate_fn=None,
    )


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


def source_of_node(key: str, node: Mapping[str, Any], settings: DataSettings, shards: BatchShards) -> Source:
    """Return the source of a config's set, which is told its shard as ``data.shard_arguments`` say."""
    given = settings.shard_arguments
    arguments = _filled(given, shards) if isinstance(given, dict) and "_method_" not in given else {}
    taken = {*parameters_of(str(node.get("_target_")), key)} if arguments else set()
    if not {*arguments} <= taken:
        if key == "data.train":
            raise RequestError(
                f"data.shard_arguments names {', '.join(arguments)}, and {node.get('_target_')} ({key}) takes "
                f"{', '.join(sorted(taken))}. Name its own arguments, or a method of it by _method_."
            )
        arguments, settings = {}, replace(settings, shard_arguments=None)  # a share of the stream
    dataset = make({**node, **arguments}, key)
    if arguments and not is_iterable(dataset):
        raise RequestError(
            f"data.shard_arguments deals iterable-style sets, and {key} is a {type(dataset).__name__} with an index, "
            f"of which each rank takes its samples anyhow. Leave it out."
        )
    own = {}
    if key == "data.train" and not is_iterable(dataset):
        nodes = {name: getattr(settings, name) for name in ("sampler", "batch_sampler")}
        own = {name: sampler_of(given, f"data.{name}", dataset) for name, given in nodes.items() if given}
    return Source(dataset, settings, None, bool(getattr(dataset, "batched", False)), **own)


def dealt_by_method(key: str, source: Source, shards: BatchShards, own: bool) -> Source:
    """Return the source of a stream as the method that ``data.shard_arguments`` names leaves it to a rank.

    Raises:
        RequestError: there is no such method, or the set is made already and arguments of its constructor are given.
    """
    dataset, given = source.dataset, source.settings.shard_arguments
    if not isinstance(given, dict) or ("_method_" not in given and not own):
        return source
    if callable(method := getattr(dataset, given.get("_method_", ""), None)):
        arguments = _filled(given, shards)
        try:
            return source._replace(dataset=method(**arguments))
        except Exception as error:
            named = ", ".join(f"{name}={value}" for name, value in arguments.items())
            error.add_note(f"This came of {given['_method_']}({named}) of {key}, as data.shard_arguments has it.")
            raise
    if key != "data.train":
        return source._replace(settings=replace(source.settings, shard_arguments=None))
    raise RequestError(
        f"data.shard_arguments={given}: {type(dataset).__name__} ({key}) has no method {given.get('_method_', '')}. "
        f"Name one of it as _method_{', for the task makes it' if own else ''}."
    )


def _filled(given: Mapping[str, str], shards: BatchShards) -> dict[str, int]:
    """Return arguments with the numbers that ``world`` and ``rank`` stand for."""
    numbers = {"world": shards.readers, "rank": shards.first}
    return {name: numbers[value] for name, value in given.items() if value in numbers and name != "_method_"}
