"""A batch in micro-batches, so that the devices of a replica work at the same time.

A model over k devices that takes a batch as a whole keeps one of them busy at a time. With m micro-batches, one after
the other, the second is in the first stage while the first is in the second: a GPU works off what it was given, and who
gave it does not wait. The backward pass does the same from the other end, for autograd has a thread for each device. So
k devices are done after m + k - 1 turns, each 1 / m of a stage's work, and there is nothing to schedule.

The idea is that of GPipe (Huang et al., 2019).
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ddp_recipes._compat.torch_ import tree_flatten, tree_unflatten
from ddp_recipes.errors import RequestError
from ddp_recipes.tasks.written import Watch

_PLAIN = (bool, int, float, str, type(None))
_REMEDY = " Use model.micro_batches=1."


def as_dict(batch: Any) -> Any:
    """Return a batch that torch looks into: of mappings it does so of dicts alone, not of a ``BatchEncoding``."""
    return {**batch} if isinstance(batch, Mapping) and not isinstance(batch, dict) else batch


def micro_batches_of(batch: Any, count: int, whose: str, remedy: str = "") -> tuple[list[Any], list[int]]:
    """Cut a batch along the first dimension of its tensors, and return the micro-batches and their numbers of samples.

    They differ by one sample at most, the larger ones first; of a small batch some have none. A list of plain values as
    long as the batch is cut as well; other plain values are given to each.

    Args:
        whose: batch it is, for a message that ends with ``remedy``.

    Raises:
        RequestError: the tensors have different numbers of samples, or something can neither be cut nor given to each.
    """
    size = _batch_size(tree_flatten(batch)[0], whose, remedy)
    values, form = _flat(batch, size)
    each, more = divmod(size, count)
    sizes = [each + (number < more) for number in range(count)]
    ends = [0, *accumulate(sizes)]

    def cut(value: Any) -> Sequence[Any]:
        if isinstance(value, list):
            return [value[start:end] for start, end in pairwise(ends)]
        return value.tensor_split(count) if isinstance(value, Tensor) else [value] * count

    return [tree_unflatten(row, form) for row in zip(*map(cut, values), strict=True)], sizes


def refuse_counts(batch_of: Callable[[int], Any]) -> None:
    """Refuse numbers that follow from the samples of a batch: each micro-batch would have that of the whole batch.

    Args:
        batch_of: returns a batch of so many samples.

    Raises:
        RequestError: there is one.
    """
    (one, form), (two, form_of_two) = (_flat(batch_of(count), count) for count in (1, 2))
    pairs = zip(one, two, strict=True) if form == form_of_two else ()
    for of_one, of_two in pairs:
        if isinstance(of_one, (int, float)) and isinstance(of_two, (int, float)) and of_one != of_two:
            raise RequestError(
                f"A number of a batch is {of_one} with one sample, {of_two} with two, and each micro-batch would have "
                f"that of the whole batch. Leave it out, and have the task take it of the tensors that it gets "
                f"(len(targets)), or use a strategy without stages, as ddp."
            )


def in_micro_batches(model: nn.Module, count: int) -> None:
    """Have the model take its inputs in so many micro-batches, and put its outputs together again.

    The loss is that of the whole batch, so they need not be equal, and gradients are exact. Batch norm takes its
    statistics from each. A batch with fewer samples has fewer of them.

    The model gets a class of its own, as torch's ``fully_shard`` does it: names in the state dict stay what they are,
    and a copy of the model is one of the same kind.
    """
    own = type(model)
    model.__class__ = type(own.__name__, (_InMicroBatches, own), {"micro_batches": count, "__module__": own.__module__})
    model._watch_of_micro_batches = Watch(model)  # type: ignore[assignment]


class _InMicroBatches(nn.Module):
    micro_batches: int
    _watch_of_micro_batches: Watch

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on each micro-batch of the inputs.

        Raises:
            RequestError: inputs or outputs are not tensors of a batch.
        """
        forward, name = super().forward, type(self).__name__
        cut, sizes = micro_batches_of((args, kwargs), self.micro_batches, f"{name} is given", _REMEDY)
        inputs, sizes = [each for each, size in zip(cut, sizes, strict=True) if size], [each for each in sizes if each]
        if len(inputs) < 2:
            return forward(*args, **kwargs)
        with nullcontext() if torch.compiler.is_compiling() else self._watch_of_micro_batches.one():
            outputs = [forward(*each_args, **each_kwargs) for each_args, each_kwargs in inputs]
        return joined_rows(outputs, sizes, f"{name} returns", _REMEDY)


def joined_rows(outputs: Sequence[Any], sizes: Sequence[int], whose: str, remedy: str = "") -> Any:
    """Put the outputs of micro-batches together, whose sizes are given.

    Raises:
        RequestError: they are not tensors, or lists, with a row for each sample.
    """
    if sum(_batch_size(tree_flatten(output)[0], whose, remedy) for output in outputs) != sum(sizes):
        raise _uncut(tree_flatten(outputs[0])[0], whose, remedy)
    flat = [_flat(output, size) for output, size in zip(outputs, sizes, strict=True)]
    columns = zip(*(values for values, _ in flat), strict=True)
    return tree_unflatten([*map(_joined, columns)], flat[0][1])


def _joined(column: Sequence[Any]) -> Any:
    if isinstance(column[0], list):
        return [*chain.from_iterable(column)]
    return torch.cat([*column]) if isinstance(column[0], Tensor) else column[0]


def _flat(values: Any, size: int) -> tuple[list[Any], Any]:
    """Return the parts of some values, and their form: a list with a plain value for each of so many samples is one."""

    def is_column(value: Any) -> bool:
        return type(value) is list and len(value) == size and all(isinstance(each, _PLAIN) for each in value)

    return tree_flatten(values, is_leaf=is_column)


def _batch_size(values: Sequence[Any], whose: str, remedy: str) -> int:
    """Return how many samples there are in the tensors among some values."""
    sizes = {value.shape[:1] for value in values if isinstance(value, Tensor)}
    if len(sizes) != 1 or not all(isinstance(value, (Tensor, *_PLAIN)) for value in values) or sizes == {()}:
        raise _uncut(values, whose, remedy)
    return int(sizes.pop()[0])


def _uncut(values: Sequence[Any], whose: str, remedy: str) -> RequestError:
    found = [f"a tensor {list(v.shape)}" if isinstance(v, Tensor) else f"a {type(v).__name__}" for v in values[:4]]
    found += [f"{len(values) - 4} more"] if len(values) > 4 else []
    return RequestError(
        f"Micro-batches are cut along the first dimension of the tensors of a batch, and {whose} "
        f"{', '.join(found) or 'none'}. Allowed: tensors that all have the samples in that dimension, in tuples, lists "
        f"and dicts.{remedy}"
    )
