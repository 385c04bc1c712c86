"""What a checkpoint holds for Lightning: its own keys, beside ours, and what the module's hooks add to them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ddp_recipes._compat.lightning import argument_of_hparams
from ddp_recipes.errors import RequestError
from ddp_recipes.runtime.tensors import contents, plain, put_together

if TYPE_CHECKING:
    from ddp_recipes.lightning.adapter import LightningTask

log = logging.getLogger(__name__)

# The format of these keys, so that load_from_checkpoint of Lightning's modules and data modules reads our files.
_KEYS_OF = "2.5.0"
_UNTIL_02, _GRADIENTS = "datamodule", "gradients"  # until 0.2 the state of a data module had that key
_HPARAMS = "hyper_parameters"
_LEFT_OUT = "left_out"  # keys that hooks have added, and that no checkpoint can hold
# What a checkpoint of the weights alone has of all this.
WEIGHTS_ONLY = {
    *("state_dict", "epoch", "global_step", "pytorch-lightning_version"),
    *(f"{of}{name}" for of in ("", "datamodule_") for name in (_HPARAMS, "hparams_name", "hparams_type")),
}


def entries(task: LightningTask, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what goes into a checkpoint beside ``state``; of what hooks add only what is loaded without running code.

    Raises:
        RequestError: a hook takes a key of ours.
    """
    module: Any = task.model
    whole = all(isinstance(each, Tensor) for each in state["model"].values())  # else no rank has what Lightning reads
    checkpoint: dict[str, Any] = {
        **({"state_dict": dict(state["model"])} if whole else {}),
        **_hyper_parameters(task, module),
        "epoch": state["cursor"]["epoch"],
        "global_step": task.trainer.global_step,
        "pytorch-lightning_version": _KEYS_OF,
    }
    task.hooks("on_save_checkpoint", checkpoint)
    if (datamodule := task.trainer.datamodule) is not None:
        task.data_hooks.of_module("on_save_checkpoint", checkpoint)
        checkpoint |= _hyper_parameters(task, datamodule, "datamodule_")
        if of_data := dict(getattr(datamodule, "state_dict", dict)()):
            checkpoint[type(datamodule).__qualname__] = of_data
    pending = {name: p.grad for name, p in task.named_parameters() if p in task.summed.pending and p.grad is not None}
    if pending:
        checkpoint[_GRADIENTS] = pending  # which a module that accumulates by itself has not stepped with yet
    owner = type(module).__name__
    if taken := sorted(checkpoint.keys() & state.keys()):
        raise RequestError(f"{owner}.on_save_checkpoint adds {', '.join(taken)}, which is a key of ours. Rename it.")
    checkpoint[_HPARAMS] = _plain_of(checkpoint[_HPARAMS])[0]  # the hook may have added some
    found, others = _plain_of(checkpoint)
    for key, why in others.items():
        if key not in task.left_out:
            log.warning(
                "%s adds '%s' to checkpoints, which only running code could load. They are written without it, so "
                "a hook that needs it fails in a resume. %s",
                owner,
                key,
                why,
            )
            task.left_out.add(key)
    return {**found, **({_LEFT_OUT: [*others]} if others else {})}


def _hyper_parameters(task: LightningTask, module: Any, of: str = "") -> dict[str, Any]:
    """Return what a module has saved of its arguments; the name of the one that held all, if it was one, and its type.

    Of the types that Lightning knows by a text there is one: a dict whose values are attributes as well.
    """
    found, others = _plain_of(dict(contents(getattr(module, "hparams", {}))))
    missing = {f"{of}{_HPARAMS}/{name}" for name in others}
    if task.trainer.is_global_zero and not missing <= task.left_out:
        task.left_out |= missing
        log.warning(
            "The hyper-parameters %s of %s are no plain data, and no checkpoint has them. Give them to "
            "load_from_checkpoint by name, or it takes their defaults.",
            ", ".join(others),
            type(module).__name__,
        )
    argument = argument_of_hparams(module)
    one = {} if argument is None else {f"{of}hparams_name": argument, f"{of}hparams_type": "AttributeDict"}
    return {f"{of}{_HPARAMS}": found, **one}


def restore(task: LightningTask, state: Mapping[str, Any]) -> None:
    """Give a checkpoint to the hooks that read it.

    Raises:
        RequestError: they need what the checkpoint could not hold.
    """
    state = put_together(state)
    pending = state.get(_GRADIENTS, {})
    for name, parameter in task.named_parameters() if pending else ():
        if name in pending:
            parameter.grad = pending[name].to(parameter.device, copy=True)
            task.summed.pending.add(parameter)
    datamodule, missing = task.trainer.datamodule, state.get(_LEFT_OUT, [])
    of_data = type(datamodule).__qualname__
    if datamodule is not None and of_data in missing:
        raise RequestError(f"{type(datamodule).__name__} cannot go on. {_never_had([of_data])}")
    try:
        task.hooks("on_load_checkpoint", state)
        if datamodule is not None:
            task.data_hooks.of_module("on_load_checkpoint", state)
            if saved := state.get(of_data, state.get(_UNTIL_02)):
                datamodule.load_state_dict(saved)
    except Exception as error:
        if not missing:
            raise
        raise RequestError(
            f"on_load_checkpoint fails with {type(error).__name__}: {error}. {_never_had(missing)}"
        ) from error


def _never_had(keys: Sequence[str]) -> str:
    return (
        f"The checkpoint never had {', '.join(keys)}, for only running code could have loaded that. Have "
        f"on_save_checkpoint add tensors, numbers, texts, lists and dicts, or load what is there: "
        f"weights_from=CHECKPOINT."
    )


def _plain_of(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return those values that are plain data, and of each of the others why it is none."""
    found, others = {}, {}
    for name, value in values.items():
        try:
            found[name] = plain(value, name)
        except TypeError as error:
            others[name] = str(error)
    return found, others
