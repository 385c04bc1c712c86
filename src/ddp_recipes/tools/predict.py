"""``mode=predict``: predictions of batches, put together in the data set's order."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ddp_recipes._compat.torch_ import tree_flatten, tree_unflatten
from ddp_recipes.build.recipe import Recipe
from ddp_recipes.errors import RequestError
from ddp_recipes.output import Output
from ddp_recipes.runtime.files import write_aside
from ddp_recipes.training.metrics import evaluated
from ddp_recipes.training.precision import make_precision


def predict(recipe: Recipe, output: Output) -> None:
    """Write the outputs for every sample, in the data set's order, to ``predictions.pt``: a tensor [samples, ...].

    Where a step returns several in a dict, a list or a tuple, there is one of each. Where rows differ in shape, as
    those of texts that each batch pads, it is a list of them. A step that returns nothing writes them itself.
    """
    ((_, loader),) = recipe.loaders.items()
    recipe.load_weights(recipe.strategy)
    recipe.forget_state()
    output.open(None)
    recipe.strategy.sync_buffers(recipe.task)
    recipe.task.enter_evaluation("predict")
    recipe.task.start_evaluation("predict", 0)
    indices: list[Tensor] = []
    outputs: list[Any] = []
    precision = make_precision(recipe.trainer.precision, recipe.device.type)
    with torch.no_grad(), recipe.strategy.evaluation(recipe.task):
        for batch in evaluated(recipe.task, loader):
            if not batch.num_samples and recipe.strategy.settings.kind != "sharded":
                continue
            with precision.forward():
                output_of_batch = recipe.task.predict_step(batch.data)
            if batch.num_samples and output_of_batch is not None:
                indices.append(loader.plan.indices(0, batch.number, batch.shard))
                outputs.append(rows_of(output_of_batch, batch.num_samples))  # of a pipeline in its last process
    recipe.task.end_evaluation("predict", {})
    gathered = recipe.strategy.gather((indices, outputs))
    if gathered is None or not any(parts for _, parts in gathered):
        return
    order = torch.cat([part for rank in gathered for part in rank[0]]).argsort()
    predictions = in_order([part for rank in gathered for part in rank[1]], order)
    output.written.append(path := recipe.job.directory / "predictions.pt")
    write_aside(path, lambda file: torch.save(predictions, file))
    if isinstance(predictions, Tensor) and (words := recipe.task.in_words(predictions)) is not None:
        output.written.append(in_words := path.with_suffix(".txt"))
        write_aside(in_words, lambda file: file.write(words.encode()))


def rows_of(output: Any, samples: int) -> Any:
    """Return what a step predicted, on the CPU, and numbers of 16 bits with 32.

    Raises:
        RequestError: something of it has not one row for each of so many samples.
    """
    leaves, structure = tree_flatten(output, is_leaf=lambda each: _is_list(each, samples))
    rows: list[Any] = []
    for each in leaves:
        if isinstance(each, Tensor) and each.dim() and len(each) == samples:
            rows.append((each.float() if each.is_floating_point() and each.itemsize < 4 else each).cpu())
        elif _is_list(each, samples):
            rows.append(list(each))
        else:
            found = f"a tensor {list(each.shape)}" if isinstance(each, Tensor) else f"a {type(each).__name__}"
            raise RequestError(
                f"predict_step returns {found} for a batch of {samples} samples. predictions.pt has a row for each "
                f"sample: return tensors [{samples}, ...], alone or in a dict, list or tuple, or nothing."
            )
    return tree_unflatten(rows, structure)


def in_order(outputs: Sequence[Any], order: Tensor) -> Any:
    """Return what :func:`rows_of` gave for all batches as one, its rows in this order."""
    flat = [tree_flatten(each, is_leaf=_is_plain_list) for each in outputs]
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return tree_unflatten([_joined(column, order) for column in columns], flat[0][1])


def _joined(parts: Sequence[Any], order: Tensor) -> Any:
    if all(isinstance(each, Tensor) and each.shape[1:] == parts[0].shape[1:] for each in parts):
        return torch.cat(list(parts))[order]
    rows = list(chain.from_iterable(parts))
    return [rows[place] for place in order.tolist()]


def _is_plain_list(value: Any) -> bool:
    """Whether a list holds plain values, such as texts, one for each sample."""
    return type(value) is list and bool(value) and all(isinstance(each, (str, int, float, bool)) for each in value)


def _is_list(value: Any, samples: int) -> bool:
    return _is_plain_list(value) and len(value) == samples
