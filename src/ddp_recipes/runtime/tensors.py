"""Tensors of which a process may have only some rows; SHA-256 over nested plain data and tensors, and sums of bits."""

import copy
import ctypes  # a tensor that was once NumPy's never changes its size again, as observers' buffers do
import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from ddp_recipes._compat.torch_ import bytes_of, storage_key


@contextmanager
def keeping_ties(module: nn.Module) -> Iterator[None]:
    """Keep parameters of a module one that are one, while it is moved to a device.

    ``nn.Module.to`` makes them apart where torch cannot put tensors of the device into the place of the CPU's.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    yield
    for first, *others in names.values():
        for name in others:
            owner, _, own = name.rpartition(".")
            setattr(module.get_submodule(owner), own, module.get_parameter(first))


def without_digest(content: Any, name: str = "") -> str | None:
    """Return in words the first thing in some content that :func:`digest` does not take, nor a checkpoint."""
    if isinstance(content, dict):
        inside = ((f"{name}.{key}" if name else str(key), value) for key, value in content.items())
    elif isinstance(content, (list, tuple)):
        inside = ((f"{name}[{number}]", value) for number, value in enumerate(content))
    else:
        known = content is None or callable(content) or isinstance(content, (torch.Tensor, bool, int, float, str))
        return None if known else f"{name}, which is a {type(content).__name__}"
    return next((found for key, value in inside if (found := without_digest(value, key)) is not None), None)


def digest(content: Any) -> str:
    """Return the hex SHA-256 of dicts (in key order), lists, tuples, numbers, text, ``None`` and tensors.

    A tensor counts by dtype, shape and bytes; device, strides and sharing of storage do not. What is large may be given
    as a function that returns it, which is called when it is due.

    Raises:
        TypeError: something else is in it.
    """
    hasher = hashlib.sha256()
    _update(hasher, content)
    return hasher.hexdigest()


def _update(hasher: Any, content: Any) -> None:
    if isinstance(content, torch.Tensor):
        hasher.update(f"tensor:{content.dtype}:{list(content.shape)}:".encode())
        own = bytes_of(content.cpu())
        hasher.update((ctypes.c_char * len(own)).from_address(own.data_ptr()) if len(own) else b"")
    elif isinstance(content, dict):
        hasher.update(f"dict:{len(content)}:".encode())
        for name in sorted(content, key=repr):
            _update(hasher, name)
            _update(hasher, content[name])
    elif isinstance(content, (list, tuple)):
        hasher.update(f"list:{len(content)}:".encode())
        for value in content:
            _update(hasher, value)
    elif callable(content):
        _update(hasher, content())
    elif content is None or isinstance(content, (bool, int, float, str)):
        text = repr(content)
        hasher.update(f"{type(content).__name__}:{len(text)}:{text}".encode())
    else:
        raise TypeError(f"{type(content).__name__} has no digest: use tensors, numbers, text, lists and dicts.")


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def sums_of_bits(tensors: Sequence[Tensor]) -> list[int]:
    """Return for each tensor a number that other bits nearly always change: their sum as whole numbers, modulo 2^64.

    One pass through memory, where the tensors are; the process waits for it.
    """
    sums = [bytes_of(each).view(_WORDS[each.element_size()]).sum(dtype=torch.int64) for each in tensors]
    found: dict[int, int] = {}
    for device in {each.device for each in sums}:
        places = [place for place, each in enumerate(sums) if each.device == device]
        found |= zip(places, torch.stack([sums[place] for place in places]).tolist(), strict=True)
    return [found[place] for place in range(len(sums))]


@runtime_checkable
class Source(Protocol):
    """A whole tensor that need not be in memory: in a checkpoint's files, or as an initialisation gives it.

    Attributes:
        shape: of the whole.
        dtype: of its numbers.
    """

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def rows(self, start: int, stop: int) -> Tensor:
        """Return rows of it, [stop - start, ...], on the CPU, in memory of their own."""


@dataclass(frozen=True)
class OwnRows:
    """The rows of a tensor that this process has.

    Attributes:
        values: [rows, ...].
        start: the first one's number in the whole.
        shape: of the whole.
    """

    values: Tensor
    start: int
    shape: torch.Size


def copied(value: Tensor | OwnRows) -> Tensor | OwnRows:
    """Return a copy on the CPU."""
    if isinstance(value, OwnRows):
        return replace(value, values=value.values.to("cpu", copy=True))
    return value.detach().to("cpu", copy=True)


def rows_of(value: Tensor | Source, start: int, stop: int) -> Tensor:
    """Return rows of a tensor, wherever it is."""
    return value[start:stop] if isinstance(value, Tensor) else value.rows(start, stop)


def rows_here(value: Tensor | Source, like: Tensor) -> Tensor:
    """Return of a whole tensor what this rank has of another one of its shape: all, unless that is a ``DTensor``.

    What is of another shape has been taken out already.
    """
    mesh = getattr(like, "device_mesh", None)
    if mesh is None or value.shape != like.shape:
        return whole_of(value)
    start, stop = span(value.shape[0], mesh.get_coordinate()[-1], mesh.size(-1))
    return rows_of(value, start, stop)


def span(rows: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return a rank's first row and the one after its last, as ``torch.chunk`` and ``DTensor`` deal them."""
    each = -(-rows // ranks)
    return min(rank * each, rows), min((rank + 1) * each, rows)


def whole_of(value: Tensor | Source) -> Tensor:
    """Return all of a tensor, wherever it is."""
    return value if isinstance(value, Tensor) else value.rows(0, value.shape[0])


def place_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return what tensors have in common that are one, such as tied weights."""
    return storage_key(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def take_attributes(tensor: Tensor, other: Tensor) -> None:
    """Give a tensor the attributes that code has set on another one: forward passes and optimizers may ask for them.

    Its own stay: a tensor without data knows by one of them on which device it would be.
    """
    vars(tensor).update(vars(other) | vars(tensor))


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor's shape says where its numbers are: it is neither sparse nor nested."""
    return tensor.layout == torch.strided and not tensor.is_nested


def tensors_in(data: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Yield the tensors in (nested) tuples, lists, dicts and objects, one after the other; no part comes twice."""
    seen = set() if seen is None else seen
    if isinstance(data, Tensor):
        yield data
    elif id(data) not in seen and not isinstance(data, type):
        seen.add(id(data))
        parts = data.values() if isinstance(data, Mapping) else data if isinstance(data, (list, tuple)) else ()
        if not isinstance(data, (Mapping, list, tuple)):
            with suppress(TypeError):  # it has no attributes: a number, a text
                parts = vars(data).values()
        for part in parts:
            yield from tensors_in(part, seen)


def change_each(data: Any, change: Callable[[Any], Any], is_one: Callable[[Any], bool] = torch.is_tensor) -> Any:
    """Return data with what ``is_one`` picks out of (nested) tuples, lists, dicts and dataclasses changed."""
    if is_one(data):
        return change(data)
    if isinstance(data, Mapping):
        return with_values(data, {name: change_each(value, change, is_one) for name, value in data.items()})
    if isinstance(data, (tuple, list)):
        changed = [change_each(value, change, is_one) for value in data]
        return type(data)(*changed) if hasattr(data, "_fields") else type(data)(changed)
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        copied = copy.copy(data)  # not made anew: what it computes when it is made is there
        names = {field.name for field in dataclasses.fields(data)} | {*getattr(data, "__dict__", ())}
        for name in names:
            if hasattr(data, name):
                object.__setattr__(copied, name, change_each(getattr(data, name), change, is_one))
        return copied
    return data


def with_values(mapping: Mapping[Any, Any], values: dict[Any, Any]) -> Mapping[Any, Any]:
    """Return a mapping of the same class, which may have attributes and methods, with other values."""
    if type(mapping) is dict or not isinstance(mapping, MutableMapping):
        return values
    copied = copy.copy(mapping)
    for name, value in values.items():
        copied[name] = value
    return copied


def plain(value: Any, name: str = "") -> Any:
    """Return a state of nothing but the types that a checkpoint is read back as, without running any code.

    Of other kinds of dicts, lists, tuples, numbers and texts, as OmegaConf's, NumPy's and those of enumerations, it has
    the values.

    Raises:
        TypeError: names what is neither tensor nor plain data.
    """
    if value is None or type(value) in (bool, int, float, str) or isinstance(value, (Tensor, OwnRows)):
        return value
    if isinstance(value, dict):
        return {plain(key, name): plain(inside, below(name, key)) for key, inside in value.items()}
    if isinstance(value, (list, tuple)):
        items = (plain(inside, below(name, number)) for number, inside in enumerate(value))
        return list(items) if isinstance(value, list) else tuple(items)
    if _is_config(value):
        return plain(contents(value), name)
    if isinstance(value, np.generic):
        return plain(value.item(), name)
    for kind in (int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, str):
        return str.__str__(value)
    raise TypeError(
        f"{name}: {type(value).__name__} cannot be in a checkpoint. Allowed: tensors, numbers, texts, and lists and "
        f"dicts of them."
    )


def contents(config: Any) -> Any:
    """Return what a part of a config holds, as it is written where what it refers to is not there; all else as is."""
    if not _is_config(config):
        return config
    from omegaconf import OmegaConf  # takes 30 ms, and streams that are read by themselves need none of it
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException:
        return OmegaConf.to_container(config)


def _is_config(value: Any) -> bool:
    return type(value).__module__.startswith("omegaconf.")


def below(name: str, key: object) -> str:
    """Return a name that nothing else in a state has: a key that could be read as several is quoted."""
    if not isinstance(key, str) or not key or {*"/["} & {*key}:
        return f"{name}[{key!r}]"
    return f"{name}/{key}" if name else key


def put_together(value: Any) -> Any:
    """Return a state with whole tensors in the place of those in files; what has none is returned as it is."""
    if isinstance(value, Source):
        return whole_of(value)
    if isinstance(value, dict):
        found = {key: put_together(inside) for key, inside in value.items()}
        return found if any(found[key] is not value[key] for key in value) else value
    if isinstance(value, (list, tuple)):
        items = type(value)(map(put_together, value))
        return items if any(new is not old for new, old in zip(items, value, strict=True)) else value
    return value
