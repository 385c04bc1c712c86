"""What a checkpoint holds for Lightning: its own keys, beside ours, and what the module's hooks add to them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ddp_recipes.checkpointing.parts import put_together
from ddp_recipes.errors import RequestError

if TYPE_CHECKING:
    from ddp_recipes.lightning.adapter import LightningTask

log = logging.getLogger(__name__)

# The format of these keys, so that LightningModule.load_from_checkpoint reads our files.
_KEYS_OF = "2.5.0"
_DATAMODULE, _GRADIENTS = "datamodule", "gradients"
# What a checkpoint of the weights alone has of all this.
WEIGHTS_ONLY = {"state_dict", "hyper_parameters", "epoch", "global_step", "pytorch-lightning_version"}


def entries(task: LightningTask, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what goes into a checkpoint beside ``state``.

    Raises:
        RequestError: a hook adds what could only be loaded by running code, or takes a key of ours.
    """
    module: Any = task.model
    whole = all(isinstance(each, Tensor) for each in state["model"].values())  # else no rank has what Lightning reads
    checkpoint: dict[str, Any] = {
        **({"state_dict": dict(state["model"])} if whole else {}),
        "hyper_parameters": _plain_only(dict(getattr(module, "hparams", {}))),
        "epoch": state["cursor"]["epoch"],
        "global_step": task.trainer.global_step,
        "pytorch-lightning_version": _KEYS_OF,
    }
    task.hooks("on_save_checkpoint", checkpoint)
    if (datamodule := task.trainer.datamodule) is not None:
        task.data_hooks.of_module("on_save_checkpoint", checkpoint)
        checkpoint[_DATAMODULE] = dict(getattr(datamodule, "state_dict", dict)())
    pending = {name: p.grad for name, p in task.named_parameters() if p in task.summed.pending and p.grad is not None}
    if pending:
        checkpoint[_GRADIENTS] = pending  # which a module that accumulates by itself has not stepped with yet
    owner = type(module).__name__
    if taken := sorted(checkpoint.keys() & state.keys()):
        raise RequestError(f"{owner}.on_save_checkpoint adds {', '.join(taken)}, which is a key of ours. Rename it.")
    if bad := sorted(key for key, value in checkpoint.items() if not _is_plain(value)):
        raise RequestError(
            f"{owner}.on_save_checkpoint adds {', '.join(bad)}, which could only be loaded by running code. Allowed: "
            f"tensors, numbers, texts, and lists and dicts of them."
        )
    return checkpoint


def restore(task: LightningTask, state: Mapping[str, Any]) -> None:
    """Give a checkpoint to the hooks that read it."""
    state = put_together(state)
    pending = state.get(_GRADIENTS, {})
    for name, parameter in task.named_parameters() if pending else ():
        if name in pending:
            parameter.grad = pending[name].to(parameter.device, copy=True)
            task.summed.pending.add(parameter)
    task.hooks("on_load_checkpoint", state)
    if (datamodule := task.trainer.datamodule) is not None and _DATAMODULE in state:
        task.data_hooks.of_module("on_load_checkpoint", state)
        datamodule.load_state_dict(state[_DATAMODULE])


def _plain_only(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyper-parameters that are plain data."""
    left_out = [name for name, value in params.items() if not _is_plain(value)]
    if left_out:
        log.debug("Not in checkpoints, for they are no plain data: the hyper-parameters %s.", ", ".join(left_out))
    return {name: value for name, value in params.items() if name not in left_out}


def _is_plain(value: Any) -> bool:
    if type(value) is dict:
        return all(isinstance(key, (str, int)) and _is_plain(each) for key, each in value.items())
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str) or isinstance(value, Tensor)
