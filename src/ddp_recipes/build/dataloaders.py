"""What a torch ``DataLoader`` that a user brings says of its data set and its batches."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

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

from ddp_recipes._compat.lightning import is_combined, mode_of
from ddp_recipes._compat.torch_ import tree_flatten
from ddp_recipes.build.data import Source
from ddp_recipes.config.settings import DataSettings
from ddp_recipes.data.combined import Collated, Together
from ddp_recipes.data.keyed import collate
from ddp_recipes.data.loader import is_iterable
from ddp_recipes.errors import RequestError


def by_name(split: str, made: Any) -> list[tuple[str, Any]]:
    """Return what a hook returned for a split: one loader, or several with their names or numbers.

    Several to train on are one: their batches come together.
    """
    if split == "train":
        return [(split, made)]
    if isinstance(made, (list, tuple)) and len(made) == 1:
        return [(split, made[0])]
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
        RequestError: it is no loader, or deals its samples to ranks itself.
    """
    if isinstance(loader, (list, tuple, Mapping)) or is_combined(loader):
        return _of_several(loader, settings, replicas)
    if not isinstance(loader, DataLoader):
        return _of_batches(name, loader, settings)
    if is_iterable(loader.dataset):
        return _of_stream(loader, settings, replicas)
    sampler, batch_sampler = loader.sampler, loader.batch_sampler
    if batch_sampler is None:
        raise RequestError(
            f"The DataLoader for {name} has batch_size=None, and its data set gives samples by number. Give it a "
            f"batch_size, or a batch_sampler."
        )
    weights: list[float] | None = None
    own: dict[str, Any] = {"begin_worker": loader.worker_init_fn}
    shuffle = type(sampler) is not SequentialSampler
    by_size = loader.batch_size is not None and type(batch_sampler) is BatchSampler  # else it was given a batch sampler
    if (
        by_size and type(sampler) is DistributedSampler
    ):  # batches are sharded over ranks already: it says in which order
        shuffle = sampler.shuffle
    elif isinstance(getattr(batch_sampler, "sampler", sampler), DistributedSampler):
        what = type(sampler).__name__ if by_size else "DistributedSampler in a batch sampler"
        raise RequestError(
            f"The DataLoader for {name} has a {what}, and batches are sharded over ranks already: each would get a "
            f"shard of a shard. Use shuffle=True or False in its place."
        )
    elif not by_size:
        own["batch_sampler"] = batch_sampler
    elif type(sampler) is WeightedRandomSampler and sampler.replacement and sampler.num_samples == len(loader.dataset):  # type: ignore[arg-type]
        weights = sampler.weights.tolist()
    elif not (type(sampler) is SequentialSampler or _shuffles(sampler, loader.dataset)):
        own["sampler"] = sampler
    settings = replace(_settings(loader, settings, replicas), shuffle=shuffle, weights=weights)
    return Source(loader.dataset, settings, None if loader.collate_fn is default_collate else loader.collate_fn, **own)


_MODES = {"max_size_cycle": False, "min_size": True}


def _of_several(loaders: Any, settings: DataSettings, replicas: int) -> Source:
    """Return the source of loaders whose batches come together, as Lightning's ``CombinedLoader`` has them.

    Raises:
        RequestError: batches of one cannot be told beforehand, or an epoch would end in another way.
    """
    mode = mode_of(loaders)
    if mode not in _MODES:
        raise RequestError(
            f"train_dataloader returns a CombinedLoader of mode={mode}. Allowed: {', '.join(_MODES)}, in which each "
            f"batch has one of each loader."
        )
    every, structure = tree_flatten(loaders.iterables if is_combined(loaders) else loaders)
    if not every:
        raise RequestError(
            f"train_dataloader returns an empty {type(loaders).__name__}. Return a DataLoader, or several."
        )
    parts: dict[str, Source] = {}
    for number, loader in enumerate(every):
        name = f"loader {number + 1} of {len(every)}"
        part = source_of(name, loader, settings, replicas)
        if part.begin_worker is not None:
            raise RequestError(
                f"{name} to train on has a worker_init_fn, and data workers read for all of them. Leave it out."
            )
        if is_iterable(part.dataset) or part.batch_sampler is not None or part.parts:
            raise RequestError(
                f"{name} to train on, a {type(loader).__name__} of {type(part.dataset).__name__}, has batches that are "
                f"not known beforehand, or are put together themselves, and each comes with one of the others. Give a "
                f"DataLoader of a set with an index, and a batch_size."
            )
        parts[name] = part._replace(
            settings=_in_proportion(name, part.settings, next(iter(parts.values()), part).settings)
        )
    functions = [part.collate() or collate for part in parts.values()]
    most = max((part.settings for part in parts.values()), key=lambda each: each.num_workers)
    dataset = Together([part.dataset for part in parts.values()])
    return Source(dataset, most, Collated(functions, structure), parts=parts, shortest=_MODES[mode])


def _in_proportion(name: str, own: DataSettings, first: DataSettings) -> DataSettings:
    """Return settings with as much of ``data.global_batch_size``, which is the first loader's, as batches are large."""
    if first.global_batch_size is None:
        return own
    size, rest = divmod(first.global_batch_size * own.batch_size, first.batch_size)
    if rest:
        raise RequestError(
            f"data.global_batch_size={first.global_batch_size} is the first loader's to train on, with batches of "
            f"{first.batch_size}; {name}, with batches of {own.batch_size}, would get no whole number in proportion. "
            f"Leave it out, or choose another one."
        )
    return replace(own, global_batch_size=size)


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


def _of_batches(name: str, loader: Any, settings: DataSettings) -> Source:
    """Return the source of anything else that gives batches, webdataset's ``WebLoader`` say: a stream of whole ones."""
    if not is_iterable(loader):
        raise RequestError(
            f"The loader for {name} is a {type(loader).__name__}. Allowed: a torch.utils.data.DataLoader, or an object "
            f"whose __iter__ gives batches."
        )
    own = replace(settings, batch_size=1, val_batch_size=1, drop_last=False, num_workers=0, collate_fn=None)
    return Source(loader, own, None, True)


def _settings(loader: "DataLoader[Any]", settings: DataSettings, replicas: int) -> DataSettings:
    """Return the settings that are the loader's own."""
    size, context = loader.batch_size or 1, loader.multiprocessing_context
    return replace(
        settings,
        batch_size=size,
        val_batch_size=size if settings.global_batch_size is None else max(1, size // replicas),
        drop_last=loader.drop_last,
        num_workers=loader.num_workers,
        persistent_workers=loader.persistent_workers or None,
        prefetch_factor=loader.prefetch_factor if loader.num_workers else None,
        multiprocessing_context=None if context is None else context.get_start_method(),
        timeout=loader.timeout if loader.num_workers and loader.timeout else None,
        pin_memory=loader.pin_memory,
        collate_fn=None,
    )
