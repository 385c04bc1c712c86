"""A task around a model that brings its loss, as those of Hugging Face's ``transformers`` do."""

from collections.abc import Mapping
from functools import cached_property
from inspect import Parameter, signature
from typing import Any

from torch import Tensor, nn

from ddp_recipes.devices import sum_dtype
from ddp_recipes.errors import RequestError
from ddp_recipes.tasks.task import StepOutput, Task

IGNORED = -100  # the label of what does not count, as in torch's cross-entropy and all of ``transformers``


class ModelLossTask(Task):
    """A model that is given the whole batch and returns its loss.

    A batch that is a mapping is given as keyword arguments, a tuple or list as arguments, anything else as one. The
    loss is ``output.loss``, ``output["loss"]``, the only scalar of a tuple or the output itself, the mean over the
    batch's samples.

    Args:
        model: any such module.
        metrics: as in :class:`Task`, of the two below.
        outputs: what metrics get of the model's output, by its name, or place in a tuple; also what is predicted.
        labels: what metrics get of the batch, likewise. What a tuple or list holds is called as the model's ``forward``
            calls it.
        mean_over: what the model's loss is the mean over: ``samples``; ``targets``: labels other than -100;
            ``following``: those but for the first of each row, as causal language models have it, which shift them.
            Batches, ranks and accumulated batches weigh as much as they have of these.
    """

    classes_last = True

    def __init__(
        self,
        model: nn.Module,
        metrics: Mapping[str, Any] | None = None,
        outputs: str | int = "logits",
        labels: str = "labels",
        mean_over: str = "samples",
    ) -> None:
        super().__init__(model, nn.Identity(), metrics)
        if mean_over not in ("samples", "targets", "following"):
            raise RequestError(f"task.mean_over={mean_over} is not known. Allowed: samples, targets, following.")
        self.outputs, self.labels, self.mean_over = outputs, labels, mean_over
        self.weighs = mean_over != "samples"

    def training_step(self, batch: Any) -> StepOutput:
        return StepOutput(self._loss_in(self._called(batch), batch), {}, None)

    def validation_step(self, batch: Any) -> StepOutput:
        """Return the model's loss, and metrics of what is named of its output and of the batch."""
        output = self._called(batch)
        values = {}
        if self.metrics:
            outputs = _named(output, self.outputs, "task.outputs", f"the output of {type(self.model).__name__}")
            values = self._measured(outputs, self._labels(batch).to(outputs.device))
        amount = self.amount(batch) if self.weighs else None
        return StepOutput(self._loss_in(output, batch), values, None, amount)

    def amount(self, batch: Any) -> Tensor:
        labels = self._labels(batch)
        counted = labels[..., 1:] if self.mean_over == "following" else labels
        return counted.ne(IGNORED).sum(dtype=sum_dtype(labels.device))

    def ignored(self, batch: Any) -> str:
        labels = _get(self._by_name(batch), self.labels)
        some = not self.weighs and isinstance(labels, Tensor) and bool((labels == IGNORED).any())
        return "task.mean_over=following (of a causal language model; of others targets)" if some else ""

    def predict_step(self, batch: Any) -> Any:
        """Return what is named of the model's output, or all of it where that is a tensor."""
        output = self._called(batch)
        whole = isinstance(output, Tensor)
        return output if whole else _named(output, self.outputs, "task.outputs", f"{type(self.model).__name__}'s")

    def _labels(self, batch: Any) -> Tensor:
        return _named(self._by_name(batch), self.labels, "task.labels", "a batch")

    def _by_name(self, batch: Any) -> Any:
        return dict(zip(self._arguments, batch, strict=False)) if isinstance(batch, (tuple, list)) else batch

    @cached_property
    def _arguments(self) -> list[str]:
        """The names of what the model takes by position."""
        kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
        return [name for name, each in signature(self.model.forward).parameters.items() if each.kind in kinds]

    def _called(self, batch: Any) -> Any:
        if isinstance(batch, Mapping):
            return self.model(**batch)
        return self.model(*batch) if isinstance(batch, (tuple, list)) else self.model(batch)

    def _loss_in(self, output: Any, batch: Any) -> Tensor:
        loss = output if isinstance(output, Tensor) else _get(output, "loss")
        scalars = [each for each in _places(output).values() if isinstance(each, Tensor) and each.dim() == 0]
        if loss is None and len(scalars) == 1:
            return scalars[0]
        if isinstance(loss, Tensor) and loss.dim() == 0:
            return loss
        given = f"the keys {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
        found = f"a tensor of {list(loss.shape)}" if isinstance(loss, Tensor) else "none"
        raise RequestError(
            f"task=model_loss takes the loss that the model returns, a scalar as output.loss, in a tuple or by itself, "
            f"and {type(self.model).__name__} returned {found}, for a batch of {given}. Name what it computes the loss "
            f"from as it does (mostly labels), e.g. by data.collate_fn, or choose another task."
        )


def _places(output: Any) -> dict[int, Any]:
    return dict(enumerate(output)) if isinstance(output, (tuple, list)) else {}


def _get(output: Any, name: str | int) -> Any:
    if isinstance(name, int):
        return _places(output).get(name)
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


def _named(values: Any, name: str | int, key: str, owner: str) -> Tensor:
    found = _get(values, name)
    if not isinstance(found, Tensor):
        names = ", ".join(map(str, values if isinstance(values, Mapping) else _places(values)))
        raise RequestError(
            f"{key}={name} is no tensor in {owner}: {names or type(values).__name__}. Set {key} to the one to use."
        )
    return found
