"""Samples to batches, and batches to devices and to the form that a model takes, whatever they are made of."""

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import default_collate


def collate(samples: list[Any]) -> Any:
    """Return a batch of samples as torch's ``default_collate`` does, of dataclasses as well.

    Numbers that are float64 only because Python's and NumPy's are get torch's default type; tensors keep theirs.
    """
    try:
        return _collate(samples)
    except (RuntimeError, TypeError, ValueError, KeyError) as error:
        error.add_note(
            "Samples have to be tensors, arrays or numbers of one shape, or (nested) tuples, lists, dicts and "
            "dataclasses of as many of them. What has to be padded or is none of these takes a function of samples: "
            "data.collate_fn=my_module.my_function"
        )
        raise


def _collate(samples: list[Any]) -> Any:
    first = samples[0]
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in dataclasses.fields(first)]
        return type(first)(**{name: _collate([getattr(sample, name) for sample in samples]) for name in names})
    if isinstance(first, Mapping):
        return {name: _collate([sample[name] for sample in samples]) for name in first}
    if isinstance(first, (tuple, list)):
        columns = [_collate(list(column)) for column in zip(*samples, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else columns
    batch = default_collate(samples)
    as_by_default = isinstance(batch, torch.Tensor) and batch.dtype == torch.float64 and not torch.is_tensor(first)
    return batch.to(torch.get_default_dtype()) if as_by_default else batch


def to_device(data: Any, device: torch.device, pin: bool = False) -> Any:
    """Move every tensor in (nested) tuples, lists, dicts and dataclasses, and what has a ``to`` of its own.

    From pinned memory the copy does not wait.
    """

    def move(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):  # a PackedSequence, a BatchEncoding
            return value.to(device)
        if value.device == device:
            return value
        # What a data set has put on another GPU cannot be pinned, nor need it be.
        return (value.pin_memory() if pin and value.is_cpu else value).to(device, non_blocking=True)

    return _each(data, move, lambda value: isinstance(value, torch.Tensor) or callable(getattr(value, "to", None)))


def samples_in(batch: Any) -> int:
    """Return the number of samples in a batch: the length of the first tensor in it; 1 without one."""
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.dim() else 1
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, (list, tuple)) and batch:
        return samples_in(batch[0])
    with suppress(TypeError):
        return samples_in(list(vars(batch).values()))
    return 1


@dataclass(frozen=True)
class Form:
    """What a model takes the tensors of a batch in.

    Attributes:
        dtype: of those of floating-point numbers; ``None``: as they come.
        channels_last: whether those of four dimensions, ``[n, c, h, w]``, lie in memory as ``[n, h, w, c]``.
    """

    dtype: torch.dtype | None = None
    channels_last: bool = False

    def of(self, data: Any) -> Any:
        """Return a batch in this form; where it is already, or may be anything, that is the batch itself."""
        return data if self == AS_IT_COMES else _each(data, self._of_one, lambda value: isinstance(value, torch.Tensor))

    def _of_one(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(self.dtype)
        if self.channels_last and tensor.dim() == 4:
            tensor = tensor.contiguous(memory_format=torch.channels_last)
        return tensor


AS_IT_COMES = Form()


def _each(data: Any, change: Callable[[Any], Any], is_one: Callable[[Any], bool]) -> Any:
    """Return data with what ``is_one`` picks out of (nested) tuples, lists, dicts and dataclasses changed."""
    if is_one(data):
        return change(data)
    if isinstance(data, Mapping):
        return {name: _each(value, change, is_one) for name, value in data.items()}
    if isinstance(data, (tuple, list)):
        changed = [_each(value, change, is_one) for value in data]
        return type(data)(*changed) if hasattr(data, "_fields") else type(data)(changed)
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        fields = {field.name: getattr(data, field.name) for field in dataclasses.fields(data) if field.init}
        return dataclasses.replace(data, **_each(fields, change, is_one))
    return data
