"""Runs a module that has Lightning's ``training_step``, ``validation_step`` and ``configure_optimizers``."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ddp_recipes.errors import RequestError
from ddp_recipes.lightning.hooks import defined, metrics_of, refuse_hooks, value_of
from ddp_recipes.tasks import OwnOptimizers, Schedule, StepOutput, Task

_STAGE = re.compile("^(val|valid|validation|test)[_/]")  # in front of a logged name


class LightningTask(Task):
    """A task around a ``LightningModule``, or any module with those methods; Lightning itself need not be installed.

    What the module logs in ``validation_step`` becomes a metric: ``val_acc``, ``valid/acc`` and ``acc`` are all
    ``val/acc``. Each logged value counts as the mean over the batch; a metric of torchmetrics is reset before an
    evaluation and computed after it. ``batch_idx`` is always 0, and there is no ``self.trainer``. What the module logs
    in ``training_step`` is not shown: the loop logs the loss itself.

    Args:
        model: has ``training_step(batch, batch_idx)`` giving the loss or a dict with ``loss``; may have
            ``validation_step``, ``predict_step`` and ``configure_optimizers``.

    Raises:
        RequestError: the model has no ``training_step``, or a hook that is not called here.
    """

    def __init__(self, model: nn.Module) -> None:
        if "training_step" not in defined(model):
            raise RequestError(
                f"task=lightning needs a module with training_step, and {type(model).__name__} has none. "
                f"For a plain module use task=classification or task=regression."
            )
        refuse_hooks(model)
        super().__init__(model, nn.Identity())
        self._logged: dict[str, Tensor] = {}  # in the latest evaluation step
        self._metrics: dict[str, Any] = {}  # of torchmetrics, logged in the latest evaluation
        model.log = self._log  # type: ignore[assignment]
        model.log_dict = self._log_dict  # type: ignore[assignment]

    def training_step(self, batch: Any) -> StepOutput:
        """Return the loss of the module's own step."""
        return StepOutput(_loss(self._call("training_step", batch)), {}, _size(batch))

    def validation_step(self, batch: Any) -> StepOutput:
        """Return the loss of the module's own step, and what it logged as metrics."""
        if "validation_step" not in defined(self.model):
            return self.training_step(batch)
        return self._evaluation("validation_step", batch)

    def test_step(self, batch: Any) -> StepOutput:
        """Return the same of the module's test step, or of its validation step where it has no other."""
        own = "test_step" in defined(self.model)
        return self._evaluation("test_step", batch) if own else self.validation_step(batch)

    def _evaluation(self, method: str, batch: Any) -> StepOutput:
        self._logged = {}
        output = self._call(method, batch)
        metrics = {name: value for name, value in self._logged.items() if name != "loss"}
        loss = self._logged.get("loss") if output is None else _loss(output)
        if loss is None:
            raise RequestError(
                f"{type(self.model).__name__}.{method} returns no loss and logs none, so there is no val/loss. Return "
                f"the loss, or log it as val_loss."
            )
        return StepOutput(loss, metrics, _size(batch))

    @property
    def stateful_metrics(self) -> dict[str, Any]:
        """The metrics of torchmetrics that the module logs."""
        return self._metrics

    def train(self, mode: bool = True) -> "LightningTask":
        """Begin to train, or to evaluate, which starts from fresh metrics."""
        if not mode:
            self._metrics = {}
            for metric in metrics_of(self.model):
                metric.reset()  # type: ignore[operator]
        super().train(mode)
        return self

    def predict_step(self, batch: Any) -> Any:
        """Return what the module predicts."""
        own = "predict_step" in defined(self.model)
        return self._call("predict_step", batch) if own else super().predict_step(batch)

    def configure_optimizers(self) -> OwnOptimizers | None:
        """Return the module's own optimizer, its scheduler if any, and the scheduler's interval; ``None`` without them.

        Raises:
            RequestError: it wants several optimizers, which one loop cannot step.
        """
        own = "configure_optimizers" in defined(self.model)
        made: Any = self.model.configure_optimizers() if own else None  # type: ignore[operator]
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
        interval = "epoch"
        if isinstance(scheduler, Mapping):
            if scheduler.get("frequency", 1) != 1:
                raise RequestError(
                    f"{type(self.model).__name__}.configure_optimizers sets frequency={scheduler['frequency']}, but "
                    f"schedulers advance once a step or epoch here. Leave it out, or scale the scheduler's own steps."
                )
            scheduler, interval = scheduler["scheduler"], scheduler.get("interval", "epoch")
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise RequestError(
                f"{type(self.model).__name__}.configure_optimizers gives a ReduceLROnPlateau, which follows a metric; "
                f"schedulers advance by steps or epochs here. Use another one."
            )
        return OwnOptimizers(optimizers, [Schedule(scheduler, interval)] if scheduler is not None else [])

    def _call(self, method: str, batch: Any) -> Any:
        return getattr(self.model, method)(batch, 0)

    def _log(self, name: str, value: Any, *_: Any, **__: Any) -> None:
        if self.training:
            return
        short = _STAGE.sub("", name)
        if (scalar := value_of(value)) is None:
            self._metrics[short] = value
        else:
            self._logged[short] = scalar

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
