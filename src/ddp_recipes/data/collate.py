"""Samples to batches, and batches to devices, whatever they are made of."""

import dataclasses
from collections.abc import Mapping
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
    if isinstance(data, torch.Tensor):
        if data.device == device:
            return data
        # What a data set has put on another GPU cannot be pinned, nor need it be.
        return (data.pin_memory() if pin and data.is_cpu else data).to(device, non_blocking=True)
    if callable(move := getattr(data, "to", None)):  # a PackedSequence, a BatchEncoding
        return move(device)
    if isinstance(data, Mapping):
        return {name: to_device(value, device, pin) for name, value in data.items()}
    if isinstance(data, (tuple, list)):
        moved = [to_device(value, device, pin) for value in data]
        return type(data)(*moved) if hasattr(data, "_fields") else type(data)(moved)
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        fields = {field.name: getattr(data, field.name) for field in dataclasses.fields(data) if field.init}
        return dataclasses.replace(data, **to_device(fields, device, pin))
    return data
