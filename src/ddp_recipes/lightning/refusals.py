"""Runs that a module written for Lightning cannot be in."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from ddp_recipes.data.order import UNKNOWN
from ddp_recipes.errors import RequestError
from ddp_recipes.lightning.hooks import REMOVED
from ddp_recipes.tasks import RunContext

_STEPS = {"validate": "validation_step", "test": "test_step"}
_OF_ALL = {  # hooks that are given gradients or weights, or an optimizer
    *("backward", "configure_gradient_clipping", "on_after_backward", "on_before_optimizer_step"),
    *("on_before_zero_grad", "on_load_checkpoint", "on_save_checkpoint", "optimizer_step"),
}


def refuse_context(module: object, own: Collection[str], manual: bool, context: RunContext) -> None:
    """Refuse a run that would not do what the module asks for.

    Args:
        own: the hooks that the module defines.
        manual: whether it steps its optimizers itself.

    Raises:
        RequestError: with what to do instead.
    """
    owner = type(module).__name__
    for name, (instead, modes) in REMOVED.items():
        if context.mode in modes and callable(getattr(module, name, None)):
            raise RequestError(
                f"{owner} has {name}, which Lightning 2 does not call and refuses. Use {instead}; outputs of the steps "
                f"are kept as attributes of the module."
            )
    step, trainer, strategy = _STEPS.get(context.mode, "training_step"), context.trainer, context.parallelism
    if step not in own and not (step == "test_step" and "validation_step" in own):
        raise RequestError(f"mode={context.mode} runs {step}, which {owner} does not define.")
    if loaders := [] if context.brings_data else sorted(name for name in own if name.endswith("_dataloader")):
        raise RequestError(
            f"{owner} brings {', '.join(loaders)}, and data is another data set. Choose data=lightning, which takes "
            f"the loaders of the module, or leave them out of it."
        )
    world = context.world
    shards = [strategy.batch_shards(replace(world, rank=rank)) for rank in range(world.world_size)]
    if strategy.pipeline is not None or any(each.first >= each.total for each in shards):
        raise RequestError(
            f"task=lightning runs {owner} as a whole on each rank, and with strategy={strategy.name} some ranks do not "
            f"have it or do not train on batches. Choose another strategy."
        )
    sees = [*(["manual optimization"] if manual else []), *sorted(_OF_ALL & {*own})]
    if sees and strategy.kind != "replicated":
        raise RequestError(
            f"With strategy={strategy.name} a rank has some rows of each parameter and gradient, and {owner} may look "
            f"at all of them: {', '.join(sees)}. Choose another strategy, or leave it to trainer.* and callbacks.*."
        )
    if trainer.precision == "16-mixed" and (by_itself := {"backward", "optimizer_step"} & {*own, *_manual(manual)}):
        raise RequestError(
            f"trainer.precision=16-mixed scales the loss, and {owner} does {' and '.join(sorted(by_itself))} by "
            f"itself. Use bf16-mixed or 32-true."
        )
    if manual and strategy.fixed_shards is not None:
        raise RequestError(
            f"strategy={strategy.name} computes a batch in {strategy.fixed_shards} shards, and {owner} steps its "
            f"optimizers in training_step (automatic_optimization=False), after one of them. Choose another strategy."
        )
    if manual and (trainer.accumulate_grad_batches > 1 or trainer.gradient_clip_val is not None):
        raise RequestError(
            f"{owner} optimizes by itself (automatic_optimization=False), so trainer.accumulate_grad_batches and "
            f"trainer.gradient_clip_val would change nothing. Leave them out, and accumulate and clip "
            f"(self.clip_gradients) in training_step."
        )


_OF_NO_WEIGHTS = {"EarlyStopping", "LearningRateMonitor"}


def _leaves_weights(kind: type) -> bool:
    """Whether a callback is one of Lightning's own that look at no weight."""
    return kind.__name__ in _OF_NO_WEIGHTS and kind.__module__.startswith(("lightning.", "pytorch_lightning."))


def refuse_rows(owner: str, callbacks: Collection[object], context: RunContext) -> None:
    """Refuse callbacks of Lightning and uneven data where a rank has rows of the weights; once both are known.

    Ranks then run the module together, also a shard without a sample, which it would count.

    Raises:
        RequestError: names them.
    """
    if context.parallelism.kind == "replicated":
        return
    for callback in (each for each in callbacks if not _leaves_weights(type(each))):
        raise RequestError(
            f"{type(callback).__name__} is written for Lightning and may look at all weights, of which a rank has some "
            f"rows with strategy={context.parallelism.name}. Use one of ours (callbacks=…), or another strategy."
        )
    for name, loader in context.loaders.items():
        if not loader.is_even:
            raise RequestError(
                f"With strategy={context.parallelism.name} all ranks run {owner} together, which logs and counts what "
                f"it is given, and the last batch of {name} has too few samples for its shards "
                f"({loader.in_words}). Choose data.global_batch_size or "
                f"data.val_batch_size so that each has one, or data.drop_last=true."
            )


def refuse_cadence(owner: str, context: RunContext, of_callbacks: Sequence[Mapping[int, int]] = ()) -> None:
    """Refuse validations in the middle of a step, as Lightning has them between batches that are accumulated.

    Args:
        of_callbacks: the batches of a step by epoch, where callbacks change them.

    Raises:
        RequestError: says which interval there may be.
    """
    trainer, batches = context.trainer, len(context.loaders["train"])
    interval = trainer.val_check_interval
    changes = {f"a callback's step from epoch {epoch} on": n for each in of_callbacks for epoch, n in each.items()}
    every = interval if isinstance(interval, int) else max(1, int(interval * batches))
    if not any(name != "train" for name in context.loaders):
        return
    if isinstance(interval, int) and interval > batches:
        raise RequestError(
            f"trainer.val_check_interval={interval}, and an epoch has {batches} batches, so {owner} would never be "
            f"validated. Give at most {batches}, or a fraction of an epoch such as 1.0."
        )
    for what, step in {"trainer.accumulate_grad_batches": trainer.accumulate_grad_batches, **changes}.items():
        if every < batches and every % step:
            raise RequestError(
                f"trainer.val_check_interval={interval} asks to validate {owner} after every {every} of "
                f"{'an unknown number of' if batches == UNKNOWN else batches} batches, and {what} takes {step} of "
                f"them. Validations are between steps: give a multiple of {step} batches, or 1.0."
            )


def _manual(manual: bool) -> tuple[str, ...]:
    return ("backward", "optimizer_step") if manual else ()
