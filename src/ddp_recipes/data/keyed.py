"""Samples to batches, and batches to devices and to the form that a model takes, whatever they are made of."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils.data import default_collate

from ddp_recipes.runtime.tensors import change_each, tensors_in, with_values

ALIGNED = 64  # bytes: where torch has tensors begin. Some kernels round otherwise where they begin elsewhere


def collate(samples: list[Any], stack: Callable[[list[Any]], Any] = default_collate) -> Any:
    """Return a batch of samples as torch's ``default_collate`` does, of dataclasses as well.

    Numbers that are float64 only because Python's and NumPy's are get torch's default type; tensors keep theirs.

    Args:
        stack: makes a batch of what is no collection.
    """
    try:
        return _collate(samples, stack)
    except (RuntimeError, TypeError, ValueError, KeyError) as error:
        error.add_note(
            "Samples have to be tensors, arrays or numbers of one shape, or (nested) tuples, lists, dicts and "
            "dataclasses of as many of them. What has to be padded or is none of these takes a function of samples: "
            "data.collate_fn=my_module.my_function"
        )
        raise


def _collate(samples: list[Any], stack: Callable[[list[Any]], Any]) -> Any:
    first = samples[0]
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in dataclasses.fields(first) if field.init]  # it makes the others itself
        return type(first)(**{name: _collate([getattr(sample, name) for sample in samples], stack) for name in names})
    if isinstance(first, Mapping):
        return with_values(first, {name: _collate([sample[name] for sample in samples], stack) for name in first})
    if isinstance(first, (tuple, list)):
        columns = [_collate(list(column), stack) for column in zip(*samples, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else columns
    batch = stack(samples)
    as_by_default = isinstance(batch, torch.Tensor) and batch.dtype == torch.float64 and not torch.is_tensor(first)
    return batch.to(torch.get_default_dtype()) if as_by_default else batch


def to_device(data: Any, device: torch.device, pin: bool = False) -> Any:
    """Move every tensor in (nested) tuples, lists, dicts and dataclasses, and what has a ``to`` of its own.

    From pinned memory the copy does not wait.
    """

    def move(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):  # a PackedSequence, a BatchEncoding
            moved = value.to(device)
            return value if moved is None else moved  # one that moves itself
        if value.device == device:
            return value
        # What a data set has put on another GPU cannot be pinned, nor need it be.
        return (value.pin_memory() if pin and value.is_cpu else value).to(device, non_blocking=True)

    return change_each(data, move, lambda value: torch.is_tensor(value) or callable(getattr(value, "to", None)))


def samples_in(batch: Any) -> int:
    """Return the number of samples in a batch: the length of the first tensor in it; 1 without one."""
    first = next(tensors_in(batch), None)
    return len(first) if first is not None and first.dim() else 1


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
        return data if self == AS_IT_COMES else change_each(data, self._of_one)

    def _of_one(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(self.dtype)
        if self.channels_last and tensor.dim() == 4:
            tensor = tensor.contiguous(memory_format=torch.channels_last)
        return tensor


AS_IT_COMES = Form()


def gives_batches(dataset: Any) -> bool:
    """Whether a data set says that it gives whole batches: its ``batched`` is true, and no method as of webdataset."""
    return getattr(dataset, "batched", False) is True


def of_several(dataset: Any, name: str) -> Any:
    """Return a data set's method that gives several samples at once; ``None`` where that is not of its ``__getitem__``.

    So it is where a class derived from the method's makes its samples anew, or where a wrapper passes on what it lacks.
    """
    for names in (getattr(dataset, "__dict__", {}), *map(vars, type(dataset).__mro__)):
        if name in names:
            return getattr(dataset, name)
        if "__getitem__" in names:
            return None
    return None


class Draw(NamedTuple):
    """A sample, and what its random numbers are keyed by."""

    sample: int
    epoch: int
    number: int  # the sample's, or its place in the epoch where it can come twice


class Fetched(NamedTuple):
    """A batch, and the names of the samples that its data sets have left out, with others in their place."""

    data: Any
    skipped: tuple[str, ...] = ()


_skipped: dict[str, None] = {}  # by this process, since it was last asked


def skip(name: str) -> None:
    """Note that a sample is left out, for it cannot be read: another one is in its place. For data sets to call."""
    _skipped[name] = None


def taken() -> tuple[str, ...]:
    """Return the names of the samples that this process has left out since it was last asked."""
    found = tuple(_skipped)
    _skipped.clear()
    return found


def fetched(make: Callable[..., Any], *given: Any) -> Fetched:
    """Return the batch that a function makes, and the names of the samples that are left out of it."""
    _skipped.clear()  # of whoever has looked at samples without using them
    data = make(*given)
    return Fetched(data, taken())


def may_skip(dataset: Any) -> bool:
    """Whether a data set, or one that it is made of, may leave samples out: it says so by its attribute ``skips``."""
    if isinstance(own := getattr(dataset, "skips", None), bool):
        return own
    parts = [getattr(dataset, "dataset", None)]
    for several in (getattr(dataset, "datasets", None), getattr(dataset, "sources", None)):
        parts += several if isinstance(several, (list, tuple)) else []
    return any(may_skip(part) for part in parts if part is not None)
