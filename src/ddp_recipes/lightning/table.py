"""Prints the hooks of the installed Lightning, and what becomes of each here."""

import sys

from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.core import hooks

from ddp_recipes.lightning.hooks import CALLED, REFUSED

# What users call, or read, or set: these are no hooks.
OFFERED = {
    *("CHECKPOINT_HYPER_PARAMS_KEY", "CHECKPOINT_HYPER_PARAMS_NAME", "CHECKPOINT_HYPER_PARAMS_TYPE"),
    *("optimizers", "lr_schedulers", "trainer", "fabric", "example_input_array", "current_epoch", "global_step"),
    *("global_rank", "local_rank", "on_gpu", "strict_loading", "logger", "loggers", "device_mesh", "print", "log"),
    *("log_dict", "manual_backward", "all_gather", "automatic_optimization", "toggle_optimizer", "name"),
    *("untoggle_optimizer", "toggled_optimizer", "freeze", "clip_gradients", "unfreeze", "to_onnx", "to_torchscript"),
    *("to_tensorrt", "load_from_checkpoint", "from_datasets", "state_key", "CHECKPOINT_HYPER_PARAMS_SPECIAL_KEY"),
}


def table() -> str:
    """Return the hooks as a table of Markdown, by the classes that may define them.

    Raises:
        LookupError: Lightning has one that is neither called nor refused.
    """
    owners = {
        "module": (LightningModule, hooks.ModelHooks, hooks.DataHooks, hooks.CheckpointHooks),
        "data module": (LightningDataModule, hooks.DataHooks),
        "callback": (Callback,),
    }
    found: dict[str, list[str]] = {}
    for owner, classes in owners.items():
        for name in dict.fromkeys(name for each in classes for name in vars(each)):
            if not name.startswith("_") and name not in OFFERED:
                found.setdefault(name, []).append(owner)
    called = found.keys() & {*CALLED, "state_dict", "load_state_dict"}
    if unknown := sorted(found.keys() - called - REFUSED.keys()):
        raise LookupError(f"Neither called nor refused: {', '.join(unknown)}.")
    by_owners: dict[str, list[str]] = {}
    for name in sorted(called):
        by_owners.setdefault(", ".join(found[name]), []).append(f"`{name}`")
    lines = ["| of | called here |", "| --- | --- |"]
    lines += [f"| {who} | {', '.join(names)} |" for who, names in by_owners.items()]
    lines += [f"| {', '.join(found[name])} | not `{name}`: {REFUSED[name]} |" for name in sorted(found.keys() - called)]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")
