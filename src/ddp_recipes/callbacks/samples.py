"""A picture of validation images with what the model makes of them."""

from collections.abc import Mapping
from importlib.util import find_spec
from io import BytesIO
from typing import Any

import torch
from torch import Tensor

from ddp_recipes.callbacks.base import Callback
from ddp_recipes.errors import RequestError

__all__ = ["SamplePredictions"]


class SamplePredictions(Callback):
    """Give the logger a grid of validation images after each validation, with prediction and target.

    The same images each time, the first ones of rank 0's first batch. For classes, of images or of their pixels.

    Args:
        num_samples: how many images.

    Raises:
        RequestError: matplotlib is not installed.
    """

    def __init__(self, num_samples: int = 8) -> None:
        if num_samples < 1:
            raise RequestError(f"callbacks.sample_predictions.num_samples={num_samples}. Allowed: at least 1.")
        if find_spec("matplotlib") is None:
            raise RequestError(
                "callbacks=sample_predictions draws with matplotlib: pip install 'ddp-recipes[figures]'."
            )
        self.num_samples = num_samples

    def check(self) -> None:
        """Refuse data without images, or a run without validation."""
        if not self.run.val:
            raise RequestError("callbacks=sample_predictions shows images of data.val, which has none. Leave it out.")
        loader = next(iter(self.run.val.values())).limited(1)
        batch = next(loader.batches(0)).data
        loader.close()
        images = batch[0] if isinstance(batch, (tuple, list)) and len(batch) == 2 else None
        targets = batch[1] if images is not None else None
        if not (_is_images(images) and isinstance(targets, Tensor) and not targets.is_floating_point()):
            raise RequestError(
                f"callbacks=sample_predictions shows pairs of images, [n, 1 or 3, height, width], and classes. The "
                f"validation data give {_described(batch)}. Leave it out, or derive a callback of your own from it."
            )
        self.batch = (batch[0][: self.num_samples], batch[1][: self.num_samples])

    def on_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Draw the images on rank 0; all ranks run the model, of which each may hold a part."""
        with torch.no_grad():
            outputs = self.run.task.predict_step(self.batch)
        outputs = self.run.strategy.gather(None if outputs is None else outputs.float().cpu())
        if outputs is not None:  # of a model in stages the last process has them
            found = next(each for each in outputs if each is not None)
            images, targets = (tensor.cpu() for tensor in self.batch)
            picture = draw(images.float(), found.argmax(dim=1), targets, f"step {step:,}")
            self.run.logger.image(f"samples/step_{step:08d}", picture)


def draw(images: Tensor, predictions: Tensor, targets: Tensor, title: str) -> bytes:
    """Return a PNG: a column for each image, with classes of pixels as pictures below it."""
    from matplotlib.figure import Figure

    dense = targets.dim() > 1
    rows, columns = (3, len(images)) if dense else (-(-len(images) // 8), min(len(images), 8))
    figure = Figure(figsize=(1.4 * columns, 1.6 * rows + 0.4), layout="constrained")
    figure.suptitle(title, fontsize=10)
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.set_axis_off()
    highest = int(max(predictions.max(), targets.max()))
    for number, image in enumerate(images):
        axis = axes[0, number] if dense else axes.flat[number]
        shown = (image - image.min()) / (image.max() - image.min()).clamp(min=1e-12)
        axis.imshow(shown.permute(1, 2, 0).squeeze(-1).numpy(), cmap="gray")
        if not dense:
            right = bool(predictions[number] == targets[number])
            text = f"{int(predictions[number])}" if right else f"{int(predictions[number])}, is {int(targets[number])}"
            axis.set_title(text, fontsize=9, color="#2a7f3f" if right else "#b3261e")
            continue
        for row, (name, classes) in enumerate((("prediction", predictions), ("target", targets)), start=1):
            axes[row, number].imshow(classes[number].numpy(), cmap="viridis", vmin=0, vmax=highest)
            axes[row, number].set_title(name, fontsize=8)
    file = BytesIO()
    figure.savefig(file, format="png", dpi=110)
    return file.getvalue()


def _is_images(images: Any) -> bool:
    return isinstance(images, Tensor) and images.dim() == 4 and images.shape[1] in (1, 3)


def _described(batch: Any) -> str:
    if isinstance(batch, Tensor):
        return f"{batch.dtype} {list(batch.shape)}".removeprefix("torch.")
    if isinstance(batch, (tuple, list)):
        return " and ".join(map(_described, batch))
    return f"a {type(batch).__name__}"
