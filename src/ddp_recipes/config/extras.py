"""The extras that commands and keys of any run lead to, by dotted path: each is imported where it is asked for."""

from importlib import import_module
from typing import Any

from ddp_recipes.errors import RequestError

# Commands by the first argument of ddp-recipes; they take the others.
BEFORE_CONFIG = {
    "index": "ddp_recipes.streams.commands:index",
    "init": "ddp_recipes.project:init",
    "pack": "ddp_recipes.streams.commands:pack",
    "report": "ddp_recipes.tools.report:report",
}
_HOMES = BEFORE_CONFIG | {  # by what is to be done in place of training, or by the key
    "plan": "ddp_recipes.tools.dry_run:plan",
    "plan=true": "ddp_recipes.tools.dry_run.cluster:devices",
    "equivalence": "ddp_recipes.tools.equivalence:equivalence",
    "lr": "ddp_recipes.tools.learning_rate:tune",
    "batch_size": "ddp_recipes.tools.batch_size:tune",
    "predict": "ddp_recipes.tools.predict:predict",
    "model.num_devices": "ddp_recipes.build.splitting:split",
    "model.micro_batches": "ddp_recipes.model_parallel:in_micro_batches",
    "weights_from": "ddp_recipes.checkpointing.weights:matching",
    "model.freeze": "ddp_recipes.build.parameters:freeze",
    "optimizer.groups": "ddp_recipes.build.parameters:optimizer_of_groups",
    "model.activation_checkpointing": "ddp_recipes.build.blocks:recompute",
    "trainer.compile": "ddp_recipes.build.blocks:compile_model",
    "what is compiled in a step": "ddp_recipes.build.blocks:Compiles",
    "data.datamodule": "ddp_recipes.build.dataloaders:by_name",
    "a DataLoader of the task": "ddp_recipes.build.dataloaders:source_of",
    "several loaders": "ddp_recipes.data.combined:combined",
    "an IterableDataset": "ddp_recipes.build.iterables:iterable_loader",
    "data.sampler": "ddp_recipes.data.samplers:sampled",
    "data.batch_sampler": "ddp_recipes.data.samplers:batched",
    "optimizers with an eval mode": "ddp_recipes.callbacks.optimizer_modes:OptimizerModes",
    "trainer.peak_flops": "ddp_recipes.tools.flops:count",
    "operations of a run": "ddp_recipes.tools.flops:follow",
    "launcher.replace_ranks": "ddp_recipes.recovery.replacement:Survival",
    "recovery": "ddp_recipes.recovery.rank_recovery:Recovery",
    "a step of Slurm": "ddp_recipes.launchers.slurm.step:translate",
    "the layout of a step of Slurm": "ddp_recipes.launchers.slurm.step:refuse_other_tasks",
    "memory of torchrun": "ddp_recipes.recovery.torchrun:TorchrunMemory",
    "trainer.fast_paths": "ddp_recipes.runtime.fast_paths:set_up",
    "socket guard": "ddp_recipes.runtime.socket_guard:closed_after",
}


def extra(name: str) -> Any:
    """Return the function that an extra has for this.

    Raises:
        RequestError: the extra is not installed.
    """
    if (found := extra_or(name, None)) is None:
        raise RequestError(f"{name} needs {_HOMES[name].partition(':')[0]}, which is not there. Leave it out.")
    return found


def extra_or(name: str, default: Any) -> Any:
    """Return the function that an extra has for this; ``default`` where the extra is not installed."""
    try:
        return by_path(_HOMES[name])
    except ModuleNotFoundError as error:
        if error.name is None or not f"{_HOMES[name].partition(':')[0]}.".startswith(f"{error.name}."):
            raise  # of something that the extra imports
        return default


def by_path(path: str) -> Any:
    """Return what ``module:name`` stands for."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
