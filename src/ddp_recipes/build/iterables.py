"""Loaders of iterable-style sets, and which runs they cannot be in."""

from dataclasses import replace
from functools import partial

from ddp_recipes.build.data import Loading, Source, filled
from ddp_recipes.config.parallelism import BatchShards
from ddp_recipes.data.iterable import Dealt, IterableLoader, nominal
from ddp_recipes.data.keyed import Form
from ddp_recipes.data.reading import is_read_once
from ddp_recipes.errors import RequestError
from ddp_recipes.strategies.base import by_rank
from ddp_recipes.training.precision import whole_dtype


def iterable_loader(
    loading: Loading, name: str, source: Source, shards: BatchShards, global_batch_size: int, own: bool
) -> IterableLoader:
    """Return the loader of an iterable-style set.

    Args:
        own: whether the task brings it.

    Raises:
        RequestError: it does not go with the run.
    """
    split, key = name.partition("/")[0], f"data.{name.replace('/', '.')}"
    limit = refuse(loading, split, key, source, shards, own)
    source = dealt_by_method(key, source, shards, own)
    settings = source.settings
    request, world, training = loading.request, loading.devices.world, split == "train"
    of = request.strategy.batch_shards if training else request.strategy.evaluation_shards
    dealt = Dealt(
        shard=shards.first,
        of_rank=[of(replace(world, rank=rank)).first for rank in range(world.world_size)],
        exchange=partial(by_rank, world=world, total=loading.strategy.sum),
        shared=settings.shard_arguments is None or shards.total == 1,
        rank=world.rank,
    )
    drop_last = settings.drop_last and (training or own)
    plan = nominal(global_batch_size, shards.total, request.run.seed, drop_last, settings.shard)
    return IterableLoader(
        source.dataset,
        plan if limit is None else replace(plan, max_batches=limit),
        loading.devices.own[0],
        dealt=dealt,
        batched=source.batched,
        num_workers=settings.num_workers,
        pin_memory=settings.pin_memory,
        collate_fn=source.collate(),
        prefetch_factor=settings.prefetch_factor,
        multiprocessing_context=settings.multiprocessing_context,
        timeout=settings.timeout or 0.0,
        begin_worker=source.begin_worker,
        replays=settings.replay,
        timeout_s=request.launcher.timeout_s,
        form=Form(whole_dtype(loading.trainer.precision), loading.trainer.channels_last),
        name=key,
    )


def refuse(loading: Loading, split: str, key: str, source: Source, shards: BatchShards, own: bool) -> int | None:
    """Refuse what needs an order or a length; return the most batches of an epoch, ``None`` for all.

    Raises:
        RequestError: with what to do instead.
    """
    settings, trainer, strategy = source.settings, loading.trainer, loading.request.strategy
    what = f"{key}, a {type(source.dataset).__name__}, is an iterable-style set"
    if is_read_once(source.dataset):
        raise RequestError(
            f"{key} is a {type(source.dataset).__name__}, an iterator, which can be read once. Give an object whose "
            f"__iter__ begins anew, such as a torch.utils.data.IterableDataset."
        )
    if strategy.fixed_shards is not None:
        raise RequestError(
            f"strategy={strategy.name} promises the same bits on any number of ranks and after a resume, and {what}, "
            f"whose order is its own. Choose another strategy, or give a set that has __len__ and __getitem__(index)."
        )
    if shards.readers * strategy.processes_per_replica < loading.devices.world.world_size:
        raise RequestError(f"{what}, and with strategy={strategy.name} some ranks read no data. Choose another one.")
    asked = loading.request.run.work
    work = {"plan": "plan=true", "batch_size": "tune=batch_size", "equivalence": "check=equivalence"}.get(asked)
    if work is not None and not (asked == "equivalence" and settings.shard_arguments is None):
        raise RequestError(f"{work} cuts an epoch's order in another way, and {what}. Give a set with an index for it.")
    limit = getattr(trainer, f"limit_{split}_batches")
    if isinstance(limit, float) and limit != 1.0:
        raise RequestError(
            f"trainer.limit_{split}_batches={limit} is a fraction, and {what}: nobody knows of how many batches. Give "
            f"a number of batches."
        )
    interval = trainer.val_check_interval
    if split == "train" and isinstance(interval, float) and interval != 1.0:
        raise RequestError(
            f"trainer.val_check_interval={interval} is a fraction of an epoch, and {what}: nobody knows of how many "
            f"batches. Give a number of batches, or 1.0 for the epoch's end."
        )
    if trainer.overfit_batches:
        raise RequestError(
            f"trainer.overfit_batches={trainer.overfit_batches} repeats the first batches, and {what}. Set "
            f"trainer.limit_train_batches, and the same set as data.val."
        )
    by_number = ("weights", "sampler", "batch_sampler", "group_by_length")
    if given := next((name for name in by_number if getattr(settings, name)), None):
        raise RequestError(f"data.{given} draws samples by their numbers, and {what}. Leave it out.")
    if settings.persistent_workers and not own:  # of a DataLoader: it would save the start of an epoch's
        raise RequestError(
            f"data.persistent_workers=true, and {what}, whose data workers begin anew with each epoch. Leave it out."
        )
    if loading.request.run.mode == "predict" and (settings.shard_arguments is not None or settings.num_workers > 1):
        raise RequestError(
            f"mode=predict writes a row for each sample in their order, and {what}, whose order is known only where "
            f"one process reads it: leave out data.shard_arguments, and set data.num_workers to at most 1."
        )
    return None if isinstance(limit, float) else limit


def dealt_by_method(key: str, source: Source, shards: BatchShards, own: bool) -> Source:
    """Return the source of a stream as the method that ``data.shard_arguments`` names leaves it to a rank.

    Raises:
        RequestError: there is no such method, or the set is made already and arguments of its constructor are given.
    """
    dataset, given = source.dataset, source.settings.shard_arguments
    if not isinstance(given, dict) or ("_method_" not in given and not own):
        return source
    if callable(method := getattr(dataset, given.get("_method_", ""), None)):
        arguments = filled(given, shards)
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
