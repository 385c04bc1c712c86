"""What a ``LightningModule`` may define, and what of it is called here: the rest is refused, never ignored."""

import torch
from torch import nn

from ddp_recipes.errors import RequestError

CALLED = {"forward", "training_step", "validation_step", "test_step", "predict_step", "configure_optimizers"}

# What to do instead, where something here does the same.
_INSTEAD = {
    "train_dataloader": "put the data set into the group data",
    "val_dataloader": "put the data set into the group data, as data.val",
    "test_dataloader": "put the data set into the group data, as data.test",
    "predict_dataloader": "put the data set into the group data, as data.predict",
    "prepare_data": "put the data set into the group data; data.download=true runs on one rank of each node",
    "configure_callbacks": "use the group callbacks",
    "configure_gradient_clipping": "use trainer.gradient_clip_val",
    "automatic_optimization": "return the loss from training_step and let the loop step",
}

REFUSED = {
    "all_gather",
    "automatic_optimization",
    "backward",
    "configure_callbacks",
    "configure_gradient_clipping",
    "configure_model",
    "configure_sharded_model",
    "lr_scheduler_step",
    "on_after_backward",
    "on_after_batch_transfer",
    "on_before_backward",
    "on_before_batch_transfer",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "on_fit_end",
    "on_fit_start",
    "on_load_checkpoint",
    "on_predict_batch_end",
    "on_predict_batch_start",
    "on_predict_end",
    "on_predict_epoch_end",
    "on_predict_epoch_start",
    "on_predict_model_eval",
    "on_predict_start",
    "on_save_checkpoint",
    "on_test_batch_end",
    "on_test_batch_start",
    "on_test_end",
    "on_test_epoch_end",
    "on_test_epoch_start",
    "on_test_model_eval",
    "on_test_model_train",
    "on_test_start",
    "on_train_batch_end",
    "on_train_batch_start",
    "on_train_end",
    "on_train_epoch_end",
    "on_train_epoch_start",
    "on_train_start",
    "on_validation_batch_end",
    "on_validation_batch_start",
    "on_validation_end",
    "on_validation_epoch_end",
    "on_validation_epoch_start",
    "on_validation_model_eval",
    "on_validation_model_train",
    "on_validation_model_zero_grad",
    "on_validation_start",
    "optimizer_step",
    "optimizer_zero_grad",
    "predict_dataloader",
    "prepare_data",
    "setup",
    "teardown",
    "test_dataloader",
    "train_dataloader",
    "transfer_batch_to_device",
    "val_dataloader",
}


def defined(model: nn.Module) -> list[str]:
    """Return the hooks that a module defines itself, by name: not those that it has from Lightning or torch."""
    found = []
    for name in sorted(CALLED | REFUSED):
        owner = next((each for each in type(model).__mro__ if name in vars(each)), None)
        if owner is not None and owner.__module__.split(".")[0] not in ("lightning", "pytorch_lightning", "torch"):
            found.append(name)
    if getattr(model, "automatic_optimization", True) is False and "automatic_optimization" not in found:
        found.append("automatic_optimization")
    return found


def refuse_hooks(model: nn.Module) -> None:
    """Refuse a module that defines what is not called here.

    Raises:
        RequestError: names each of them, and what to do instead where there is something.
    """
    refused = [name for name in defined(model) if name in REFUSED]
    if refused:
        instead = "".join(f" Instead of {name}: {_INSTEAD[name]}." for name in refused if name in _INSTEAD)
        raise RequestError(
            f"{type(model).__name__} defines {', '.join(refused)}, which task=lightning does not call.{instead} "
            f"Called are: {', '.join(sorted(CALLED))}."
        )


def metrics_of(model: nn.Module) -> list[nn.Module]:
    """Return the metrics of torchmetrics among a module's own."""
    return [each for each in model.modules() if each is not model and _is_metric(each)]


def _is_metric(value: object) -> bool:
    return all(callable(getattr(value, name, None)) for name in ("update", "compute", "reset"))


def value_of(value: object) -> "torch.Tensor | None":
    """Return a logged value as a scalar, or ``None`` for a metric, which is computed once all batches are done."""
    return None if _is_metric(value) else torch.as_tensor(value).detach().float()
