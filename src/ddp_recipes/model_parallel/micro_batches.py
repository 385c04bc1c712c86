"""A batch in micro-batches, so that the devices of a replica work at the same time.

A model over k devices that takes a batch as a whole keeps one of them busy at a time. With m micro-batches, one after
the other, the second is in the first stage while the first is in the second: a GPU works off what it was given, and who
gave it does not wait. The backward pass does the same from the other end, for autograd has a thread for each device. So
k devices are done after m + k - 1 turns, each 1 / m of a stage's work, and there is nothing to schedule.

The idea is that of GPipe (Huang et al., 2019).
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
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

    They differ by one sample at most, the larger ones first; of a small batch some have none.

    Args:
        whose: batch it is, for a message that ends with ``remedy``.

    Raises:
        RequestError: the tensors have different numbers of samples, or something can neither be cut nor given to each.
    """
    values, form = tree_flatten(batch)
    each, more = divmod(_batch_size(values, whose, remedy), count)
    columns = [value.tensor_split(count) if isinstance(value, Tensor) else [value] * count for value in values]
    micro_batches = [tree_unflatten(row, form) for row in zip(*columns, strict=True)]
    return micro_batches, [each + (number < more) for number in range(count)]


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
        inputs = [each for each, size in zip(cut, sizes, strict=True) if size]
        if len(inputs) < 2:
            return forward(*args, **kwargs)
        with nullcontext() if torch.compiler.is_compiling() else self._watch_of_micro_batches.one():
            outputs = [forward(*each_args, **each_kwargs) for each_args, each_kwargs in inputs]
        return _joined(outputs, sum(sizes), f"{name} returns")


def _joined(outputs: Sequence[Any], size: int, whose: str) -> Any:
    """Put the outputs of the micro-batches together."""
    flat = [tree_flatten(output) for output in outputs]
    if sum(_batch_size(values, whose, _REMEDY) for values, _ in flat) != size:
        raise _uncut(flat[0][0], whose, _REMEDY)
    columns = zip(*(values for values, _ in flat), strict=True)
    joined = [torch.cat(column) if isinstance(column[0], Tensor) else column[0] for column in columns]
    return tree_unflatten(joined, flat[0][1])


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
