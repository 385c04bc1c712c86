"""Prints the hooks of the installed Lightning, what becomes of each here, and the test that shows it."""

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

_PROJECTS = "test_lightning_projects.py: "
_NUMBERS, _ORDER = f"{_PROJECTS}numbers of Lightning", f"{_PROJECTS}order of Lightning"
_SHOWN = {
    **dict.fromkeys(("forward", "training_step", "validation_step", "test_step", "configure_optimizers"), _NUMBERS),
    **dict.fromkeys(("train_dataloader", "val_dataloader", "test_dataloader"), _NUMBERS),
    **dict.fromkeys(("on_save_checkpoint", "on_load_checkpoint", "state_dict", "load_state_dict"), "test_lightning.py"),
    "on_exception": "test_lightning.py",
}


def rows() -> list[tuple[str, str, str, str]]:
    """Return each hook with who may define it, what becomes of it, and the test that shows it.

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
    states = dict.fromkeys({*CALLED, "state_dict", "load_state_dict"}, "called")
    states |= {name: f"refused: {instead}" for name, instead in REFUSED.items()}
    if unknown := sorted(found.keys() - states.keys()):
        raise LookupError(f"Neither called nor refused: {', '.join(unknown)}.")
    return [
        (name, ", ".join(found[name]), states[name], _SHOWN.get(name, _ORDER) if states[name] == "called" else "")
        for name in sorted(found)
    ]


def table() -> str:
    """Return them as a table of Markdown."""
    lines = ["| hook | of | here | shown by |", "| --- | --- | --- | --- |"]
    lines += [f"| `{name}` | {owner} | {state} | {test} |" for name, owner, state, test in rows()]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")
