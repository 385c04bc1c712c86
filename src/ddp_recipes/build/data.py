"""Loaders of the config's data sets."""

from collections.abc import Mapping
from typing import Any

import torch

from ddp_recipes.build.instantiate import make
from ddp_recipes.config.parallelism import BatchShards
from ddp_recipes.config.settings import DataSettings, TrainerSettings, batches
from ddp_recipes.data.batch_plan import BatchPlan
from ddp_recipes.data.loader import Loader, size_of
from ddp_recipes.errors import RequestError

SPLITS = {
    "fit": ("train", "val"),
    "validate": ("val",),
    "test": ("test",),
    "predict": ("predict", "test", "val"),
    "export": (),
}


def make_loaders(
    data: Mapping[str, Any],
    settings: DataSettings,
    trainer: TrainerSettings,
    mode: str,
    seed: int,
    shards: BatchShards,
    evaluation_shards: BatchShards,
    replicas_a_shard: int,
    device: torch.device,
) -> dict[str, Loader]:
    """Return the loaders that a mode needs, by split; validation may be missing in ``fit``.

    Args:
        data: the config's section.
        shards: those of each global batch that this rank trains on.
        evaluation_shards: those of any other split.
        replicas_a_shard: replicas that share one; ``batch_size`` is for each of them.

    Raises:
        RequestError: the data have no split for the mode, or cannot be cut into such batches.
    """
    names = SPLITS[mode]
    if not names:
        return {}
    found = [name for name in names if data.get(name) is not None]
    if not found or (mode == "fit" and "train" not in found):
        needed = " or ".join(f"data.{name}" for name in (names[:1] if mode == "fit" else names))
        raise RequestError(
            f"mode={mode} needs {needed}, which this data choice does not have. Give it in the data yaml, or choose "
            f"another data or mode."
        )
    loaders = {
        name: _make_loader(
            name,
            data[name],
            settings,
            trainer,
            seed,
            shards if name == "train" else evaluation_shards,
            replicas_a_shard,
            device,
        )
        for name in (found if mode == "fit" else found[:1])
    }
    if trainer.overfit_batches and "val" in loaders:
        loaders["val"] = loaders["train"]
    return loaders


def _make_loader(
    split: str,
    node: Mapping[str, Any],
    settings: DataSettings,
    trainer: TrainerSettings,
    seed: int,
    shards: BatchShards,
    replicas_a_shard: int,
    device: torch.device,
) -> Loader:
    dataset = make(node, f"data.{split}")
    training, replicas = split == "train", shards.total * replicas_a_shard
    if not training:
        global_batch = settings.val_batch_size * replicas
    else:
        global_batch = settings.global_batch_size or settings.batch_size * replicas
        if global_batch < replicas:
            raise RequestError(
                f"data.global_batch_size={global_batch} is less than one sample for each of {replicas} replicas. "
                f"Use at least {replicas}, or fewer {'processes' if shards.count == 1 else 'shards'}."
            )
    plan = BatchPlan(
        num_samples=size_of(dataset),
        global_batch_size=global_batch,
        num_shards=shards.total,
        seed=seed,
        shuffle=training and settings.shuffle and not trainer.overfit_batches,
        drop_last=training and settings.drop_last,
        sharding=settings.shard,
    )
    limit = getattr(trainer, f"limit_{split}_batches")
    return Loader(
        dataset,
        plan.limited(batches(limit, plan.num_batches)),
        device,
        shards=shards.numbers,
        num_workers=settings.num_workers,
        pin_memory=settings.pin_memory,
    )
