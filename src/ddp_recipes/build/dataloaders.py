"""What a torch ``DataLoader`` that a user brings says of its data set and its batches."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
    default_collate,
)

from ddp_recipes.config.settings import DataSettings
from ddp_recipes.errors import RequestError


class Source(NamedTuple):
    """A data set, how it is cut into batches, and what makes a batch of its samples, where that is an object."""

    dataset: Any
    settings: DataSettings
    collate_fn: Callable[[list[Any]], Any] | None = None


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
    """Return the source of a loader: its order is computed from the seed, so only whether it is shuffled counts.

    Args:
        replicas: over which a global batch is dealt; the loader's ``batch_size`` is for each of them.

    Raises:
        RequestError: it is no ``DataLoader``, or draws its samples in a way that no order can be computed for.
    """
    if not isinstance(loader, DataLoader):
        raise RequestError(f"The loader for {name} is a {type(loader).__name__}. Allowed: torch.utils.data.DataLoader.")
    sampler, batch_sampler = loader.sampler, loader.batch_sampler
    if loader.batch_size is None or type(batch_sampler) is not BatchSampler:
        raise RequestError(
            f"The DataLoader for {name} has batch_sampler={type(batch_sampler).__name__}. Every sample counts once on "
            f"any number of ranks, so batches are cut here: give it batch_size and shuffle instead."
        )
    if loader.worker_init_fn is not None:
        raise RequestError(
            f"The DataLoader for {name} has a worker_init_fn, which is not called: what a sample draws at random "
            f"follows from the seed, the epoch and its number. Leave it out."
        )
    weights: list[float] | None = None
    if type(sampler) is WeightedRandomSampler and sampler.replacement and sampler.num_samples == len(loader.dataset):  # type: ignore[arg-type]
        weights = sampler.weights.tolist()
    elif type(sampler) is RandomSampler and (sampler.replacement or sampler.num_samples != len(loader.dataset)):  # type: ignore[arg-type]
        raise RequestError(
            f"The DataLoader for {name} has a RandomSampler with replacement or num_samples. Use shuffle=True, and "
            f"trainer.limit_train_batches for part of an epoch."
        )
    elif type(sampler) not in (SequentialSampler, RandomSampler):
        raise RequestError(
            f"The DataLoader for {name} has the sampler {type(sampler).__name__}, whose order is not known. Every "
            f"sample counts once on any number of ranks: use shuffle=True or False, or a WeightedRandomSampler."
        )
    size = loader.batch_size
    val_size = size if settings.global_batch_size is None else max(1, size // replicas)
    return Source(
        loader.dataset,
        replace(
            settings,
            batch_size=size,
            val_batch_size=val_size,
            shuffle=type(sampler) is not SequentialSampler,
            drop_last=loader.drop_last,
            num_workers=loader.num_workers,
            persistent_workers=loader.persistent_workers or None,
            prefetch_factor=loader.prefetch_factor if loader.num_workers else None,
            pin_memory=loader.pin_memory,
            collate_fn=None,
            weights=weights,
        ),
        None if loader.collate_fn is default_collate else loader.collate_fn,
    )
