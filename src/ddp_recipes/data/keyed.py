"""Samples to batches, and batches to devices and to the form that a model takes, whatever they are made of."""

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset, Subset, default_collate, get_worker_info

from ddp_recipes._compat.torch_ import tree_leaves
from ddp_recipes.devices import is_accelerator
from ddp_recipes.runtime.seeding import (
    Twins,
    are_rng_states,
    key,
    restored,
    rng_states,
    seed_cpu,
    seeded,
    set_rng_states,
)
from ddp_recipes.runtime.tensors import change_each, tensors_in, with_values

LARGE = 32 << 20  # bytes of a batch: glibc gives so much back when it is freed, and the system fills it with zeros anew
ALIGNED = 64  # bytes: where torch has tensors begin. Some kernels round otherwise where they begin elsewhere
_AT_A_TIME = 2  # batches: the one that is used, and the next


class Stack:
    """Stacks samples as ``default_collate`` does; a large batch in the memory of an earlier one that nobody has now.

    With 64 images of 224 x 224 taking new memory is a quarter of what decoding them takes.
    """

    def __init__(self) -> None:
        self._buffers: list[NDArray[np.uint8]] = []

    def __call__(self, samples: list[Any]) -> Any:
        first = samples[0]
        large = type(first) is torch.Tensor and first.is_cpu and first.nbytes * len(samples) >= LARGE
        alike = large and all(
            type(each) is torch.Tensor and each.is_cpu and (each.shape, each.dtype) == (first.shape, first.dtype)
            for each in samples
        )
        if not alike or get_worker_info() is not None or any(each.requires_grad for each in samples):
            return default_collate(samples)  # a data worker's are in memory that it shares
        into = torch.from_numpy(self._memory(first.nbytes * len(samples))).view(first.dtype)
        return torch.stack(samples, out=into.view(len(samples), *first.shape))

    def _memory(self, size: int) -> NDArray[np.uint8]:
        for buffer in self._buffers:
            if buffer.nbytes == size + ALIGNED and sys.getrefcount(buffer) == _UNUSED:
                break
        else:
            buffer = np.empty(size + ALIGNED, dtype=np.uint8)
            self._buffers = [buffer, *self._buffers][:_AT_A_TIME]
        start = -buffer.ctypes.data % ALIGNED
        return buffer[start : start + size]  # which holds the buffer, as tensors hold it


_UNUSED = 3  # references, of the list, a variable and the call that counts them


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


class KeyedDataset(Dataset[Any]):
    """Draws what a sample's random transforms draw from (seed, epoch, sample): the same in any worker of any rank.

    A ``__getitems__`` of the data set fetches a batch at once as long as it draws nothing: what it gives is then what
    each sample by itself would be. Where it draws, samples are fetched again, each with numbers of its own. So is one
    that is the first to draw from ``random`` or NumPy, which are seeded from there on.

    A ``set_epoch`` of the data set is called with the epoch before each batch, in whichever process fetches it.

    Args:
        collate_fn: makes a batch of samples, with random numbers keyed by (seed, epoch, first sample).
    """

    def __init__(self, dataset: Any, seed: int, name: str, collate_fn: Callable[[list[Any]], Any]) -> None:
        self.dataset, self.seed, self.name, self.collate_fn = dataset, seed, name, collate_fn
        self._at_once = callable(of_several(dataset, "__getitems__"))
        self._set_epoch = getattr(dataset, "set_epoch", None)
        self._stack = Stack()
        self._twins: Twins | None = Twins()  # until a sample has drawn from random or NumPy

    def __getitems__(self, draws: Sequence[Draw]) -> Fetched:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # as in a data worker: sums on several threads have other bits
        try:
            if callable(self._set_epoch):
                self._set_epoch(draws[0].epoch)
            batch = fetched(self._batch, draws)
            if get_worker_info() is not None:
                refuse_devices(batch.data, self.name)
            return batch
        finally:
            torch.set_num_threads(threads)

    def _batch(self, draws: Sequence[Draw]) -> Any:
        samples = self._fetched_at_once(draws) if self._at_once else None
        if samples is None:
            with restored():
                if self._twins is not None:
                    self._twins.settle(0)
                samples = [self._sample(draw) for draw in draws]
        if self.collate_fn is collate:
            return collate(samples, self._stack)
        with seeded(key(self.seed, draws[0].epoch, draws[0].number, 0)):  # not what the first sample has drawn
            return self.collate_fn(samples)

    def _fetched_at_once(self, draws: Sequence[Draw]) -> list[Any] | None:
        before = rng_states()
        try:
            samples: list[Any] = self.dataset.__getitems__([draw.sample for draw in draws])
            self._at_once = are_rng_states(before)
        except Exception:  # noqa: BLE001 - one by one it is raised again, and by which sample is known then
            self._at_once = False
        if self._at_once:
            return samples
        set_rng_states(before)
        return None

    def _sample(self, draw: Draw) -> Any:
        """Return a sample. It leaves the generators seeded: the batch puts them back once."""
        value = key(self.seed, draw.epoch, draw.number)
        if self._twins is None:
            seed_cpu(value)
        else:
            torch.default_generator.manual_seed(value)
        try:
            sample = self.dataset[draw.sample]
        except Exception as error:
            if self._has_drawn():
                return self._sample(draw)
            file = file_of(self.dataset, draw.sample)
            error.add_note(
                f"{type(error).__name__} of sample {draw.sample} of {self.name}, a {type(self.dataset).__name__} "
                f"of {len(self.dataset)}{'' if file is None else f', the file {file}'}: {error}"
            )
            raise
        return self._sample(draw) if self._has_drawn() else sample

    def _has_drawn(self) -> bool:
        """Whether a sample has drawn from ``random`` or NumPy, as the first one."""
        if self._twins is None or not self._twins.differ():
            return False
        self._twins = None
        return True


def refuse_devices(batch: Any, name: str) -> None:
    """Refuse what a data worker cannot give to its rank."""
    places = {each.device for each in tree_leaves(batch) if isinstance(each, torch.Tensor)}
    if found := next((place for place in places if is_accelerator(place)), None):
        raise RuntimeError(
            f"{name} gives tensors on {found} in a data worker, and devices are for the rank's own process. Set "
            f"data.num_workers=0, or give tensors on the CPU: each batch is moved to the rank's device."
        )


def file_of(dataset: Any, sample: int) -> str | None:
    """Return the file that a sample is read from, where a data set lists its files as torchvision's and ours do."""
    while isinstance(dataset, Subset):
        dataset, sample = dataset.dataset, dataset.indices[sample]
    for name in ("samples", "files"):
        if isinstance(entries := getattr(dataset, name, None), (list, tuple)) and sample < len(entries):
            entry = entries[sample]
            file = entry[0] if isinstance(entry, (tuple, list)) and entry else entry
            if isinstance(file, (str, Path)):
                return str(Path(file).absolute())
    return None
