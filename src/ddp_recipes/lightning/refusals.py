"""Runs that a module written for Lightning cannot be in."""

from collections.abc import Collection
from dataclasses import replace

from ddp_recipes.errors import RequestError
from ddp_recipes.tasks import Surroundings

_STEPS = {"validate": "validation_step", "test": "test_step"}


def refuse_surroundings(owner: str, own: Collection[str], manual: bool, around: Surroundings) -> None:
    """Refuse a run that would not do what the module asks for.

    Args:
        owner: the module's class.
        own: the hooks that it defines.
        manual: whether it steps its optimizers itself.

    Raises:
        RequestError: with what to do instead.
    """
    step, trainer, strategy = _STEPS.get(around.mode, "training_step"), around.trainer, around.parallelism
    if step not in own and not (step == "test_step" and "validation_step" in own):
        raise RequestError(f"mode={around.mode} runs {step}, which {owner} does not define.")
    if loaders := [] if around.brings_data else sorted(name for name in own if name.endswith("_dataloader")):
        raise RequestError(
            f"{owner} brings {', '.join(loaders)}, and data is another data set. Choose data=lightning, which takes "
            f"the loaders of the module, or leave them out of it."
        )
    world = around.world
    shards = [strategy.batch_shards(replace(world, rank=rank)) for rank in range(world.world_size)]
    if not strategy.whole_model or any(each.first >= each.total for each in shards):
        raise RequestError(
            f"task=lightning runs {owner} as a whole on each rank, and with strategy={strategy.name} some ranks do not "
            f"have it or do not train on batches. Choose another strategy."
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


def _manual(manual: bool) -> tuple[str, ...]:
    return ("backward", "optimizer_step") if manual else ()
