"""Runs a module that has Lightning's ``training_step``, ``validation_step`` and ``configure_optimizers``."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ddp_recipes.errors import RequestError
from ddp_recipes.tasks import StepOutput, Task


class LightningTask(Task):
    """A task around a ``LightningModule``, or any module with those methods; Lightning itself need not be installed.

    What the module logs in ``validation_step`` becomes a metric: ``val_acc``, ``val/acc`` and ``acc`` are all
    ``val/acc``. Each logged value counts as the mean over the batch. ``batch_idx`` is always 0, and there is no
    ``self.trainer``: what needs it belongs into the config.

    Args:
        model: has ``training_step(batch, batch_idx)`` giving the loss or a dict with ``loss``; may have
            ``validation_step``, ``predict_step`` and ``configure_optimizers``.

    Raises:
        RequestError: the model has no ``training_step``.
    """

    def __init__(self, model: nn.Module) -> None:
        if not hasattr(model, "training_step"):
            raise RequestError(
                f"task=lightning needs a module with training_step, and {type(model).__name__} has none. "
                f"For a plain module use task=classification or task=regression."
            )
        super().__init__(model, nn.Identity())
        self._logged: dict[str, Tensor] = {}
        model.log = self._log  # type: ignore[assignment]
        model.log_dict = self._log_dict  # type: ignore[assignment]

    def training_step(self, batch: Any) -> StepOutput:
        """Return the loss of the module's own step."""
        return StepOutput(_loss(self._call("training_step", batch)), {}, _size(batch))

    def validation_step(self, batch: Any) -> StepOutput:
        """Return the loss of the module's own step, and what it logged as metrics."""
        if not hasattr(self.model, "validation_step"):
            return self.training_step(batch)
        self._logged = {}
        output = self._call("validation_step", batch)
        metrics = {name: value for name, value in self._logged.items() if name != "loss"}
        loss = _loss(output) if output is not None else self._logged.get("loss", torch.tensor(float("nan")))
        return StepOutput(loss, metrics, _size(batch))

    def predict_step(self, batch: Any) -> Any:
        """Return what the module predicts."""
        own = hasattr(self.model, "predict_step")
        return self._call("predict_step", batch) if own else super().predict_step(batch)

    def configure_optimizers(self) -> tuple[torch.optim.Optimizer, Any, str] | None:
        """Return the module's own optimizer, its scheduler if any, and the scheduler's interval; ``None`` without them.

        Raises:
            RequestError: it wants several optimizers, which one loop cannot step.
        """
        made: Any = getattr(self.model, "configure_optimizers", lambda: None)()
        if made is None:
            return None
        if isinstance(made, torch.optim.Optimizer):
            optimizers, schedulers = [made], []
        elif isinstance(made, Mapping):
            optimizers, schedulers = [made["optimizer"]], [made["lr_scheduler"]] if "lr_scheduler" in made else []
        elif len(made) == 2 and isinstance(made[0], (list, tuple)):
            optimizers, schedulers = made
        else:
            optimizers, schedulers = list(made), []
        if len(optimizers) != 1 or len(schedulers) > 1:
            raise RequestError(
                f"{type(self.model).__name__}.configure_optimizers gives {len(optimizers)} optimizers and "
                f"{len(schedulers)} schedulers. Allowed: one optimizer and at most one scheduler."
            )
        scheduler = schedulers[0] if schedulers else None
        if isinstance(scheduler, Mapping):
            return optimizers[0], scheduler["scheduler"], scheduler.get("interval", "epoch")
        return optimizers[0], scheduler, "epoch"

    def _call(self, method: str, batch: Any) -> Any:
        return getattr(self.model, method)(batch, 0)

    def _log(self, name: str, value: Any, *_: Any, **__: Any) -> None:
        short = name.removeprefix("val_").removeprefix("val/")
        self._logged[short] = torch.as_tensor(value).detach().float()

    def _log_dict(self, values: Mapping[str, Any], *_: Any, **__: Any) -> None:
        for name, value in values.items():
            self._log(name, value)


def _loss(output: Any) -> Tensor:
    loss: Tensor = output["loss"] if isinstance(output, Mapping) else output
    return loss


def _size(batch: Any) -> int:
    """Return the number of samples in a batch: the length of the first tensor in it."""
    while not isinstance(batch, Tensor):
        batch = next(iter(batch.values())) if isinstance(batch, Mapping) else batch[0]
    return len(batch)
