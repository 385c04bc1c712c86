"""Collectives of plain data and tensors: JSON says how they are nested, and bytes follow it. Nothing is unpickled."""

import json
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_recipes._compat.torch_ import bytes_of
from ddp_recipes.devices import of_group
from ddp_recipes.errors import RunFailed
from ddp_recipes.strategies.exchanges import exchanged, receive, send

_HEADER = 8  # bytes that hold the length of the JSON
LARGE = 1 << 16  # bytes, of a tensor that is a message of its own


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any] | None:
    """Return every rank's value, in rank order, on the first rank of the group; ``None`` elsewhere.

    Large tensors come one after the other, so that no device ever has more than one of another rank's.
    """
    large: list[Tensor] = []
    mine = pack(value, large).to(of_group(group))
    sizes = [torch.zeros(1, dtype=torch.int64, device=mine.device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([len(mine)], device=mine.device), group=group)
    lengths = [int(size) for size in sizes]
    padded = mine.new_zeros(max(lengths))
    padded[: len(mine)] = mine
    parts = [torch.empty_like(padded) for _ in lengths] if dist.get_rank(group) == 0 else None
    exchanged(dist.gather, padded, parts, group=group, group_dst=0)
    if parts is None:
        for tensor in large:
            send(bytes_of(tensor).to(mine.device), group=group, group_dst=0)
        return None
    values = []
    for source, (part, length) in enumerate(zip(parts, lengths, strict=True)):
        unfilled: list[Tensor] = []
        values.append(unpack(part[:length].cpu(), unfilled))
        for number, tensor in enumerate(unfilled):
            content = bytes_of(tensor)
            if source == 0:
                there = bytes_of(large[number])
            else:
                there = content if mine.is_cpu else torch.empty_like(content, device=mine.device)
                receive(there, group=group, group_src=source)
            if there is not content:
                content.copy_(there)
    return values


def broadcast(value: Any, source: int, group: dist.ProcessGroup | None = None) -> Any:
    """Return the value of the group's rank ``source`` on all its ranks, and there itself as it is.

    A large tensor goes from where it is in memory to where it stays: each copy of a model's state would take as long.
    """
    large: list[Tensor] = []
    sends = dist.get_rank(group) == source
    packed = (pack(value, large) if sends else torch.empty(0, dtype=torch.uint8)).to(of_group(group))
    size = torch.tensor([len(packed)], device=packed.device)
    exchanged(dist.broadcast, size, group=group, group_src=source)
    if not sends:
        packed = packed.new_empty(int(size))
    exchanged(dist.broadcast, packed, group=group, group_src=source)
    received = value if sends else unpack(packed.cpu(), large)
    for tensor in large:
        content = bytes_of(tensor)
        there = content.to(packed.device)
        exchanged(dist.broadcast, there, group=group, group_src=source)
        if not sends and there is not content:
            content.copy_(there)
    return received


def pack(value: Any, large: list[Tensor] | None = None) -> Tensor:
    """Return as bytes what is made of tensors, dicts, lists, tuples, strings, numbers, booleans and ``None``."""
    return torch.cat([*pieces(value, large)])


def pieces(value: Any, large: list[Tensor] | None = None) -> Iterator[Tensor]:
    """Yield the bytes of :func:`pack` one after the other, those of tensors as they are in memory.

    Args:
        large: takes the tensors of ``LARGE`` bytes and more in the place of their bytes.
    """
    tensors: list[Tensor] = []
    text = json.dumps(_described(value, tensors)).encode()
    yield torch.frombuffer(bytearray(len(text).to_bytes(_HEADER) + text), dtype=torch.uint8)
    for each in tensors:
        if large is not None and each.nbytes >= LARGE:
            large.append(each)
        else:
            yield bytes_of(each).cpu()


def unpack(message: Tensor, large: list[Tensor] | None = None) -> Any:
    """Return what :func:`pack` was given, with tensors on the CPU.

    Args:
        large: takes the tensors of ``LARGE`` bytes and more, which are still to be filled.

    Raises:
        RunFailed: nothing that it returns.
    """
    start = _HEADER + int.from_bytes(message[:_HEADER].numpy().tobytes())
    try:
        return _made(json.loads(message[_HEADER:start].numpy().tobytes()), _Bytes(message, start, large))
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise RunFailed(f"What another rank sent cannot be read: {error!r:.200}") from error


class _Bytes:
    """Cuts the tensors of a message out of it, one after the other."""

    def __init__(self, message: Tensor, start: int, large: list[Tensor] | None) -> None:
        self._message, self._start, self._large = message, start, large

    def cut(self, name: str, shape: Sequence[int]) -> Tensor:
        dtype = getattr(torch, name)
        size = math.prod(shape) * dtype.itemsize
        if self._large is not None and size >= LARGE:
            self._large.append(torch.empty(shape, dtype=dtype))
            return self._large[-1]
        taken = self._message[self._start : self._start + size].clone()  # aligned, and does not keep the message
        self._start += size
        return taken.view(dtype).view(shape)


def _described(value: Any, tensors: list[Tensor]) -> Any:
    """Return a value as JSON; a list stands for anything but a string, a number, a boolean and ``None``."""
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, Tensor):
        tensors.append(value)
        return ["tensor", str(value.dtype).removeprefix("torch."), list(value.shape)]
    if isinstance(value, dict):
        return ["dict", *([_described(each, tensors) for each in pair] for pair in value.items())]
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return [kind, *(_described(each, tensors) for each in value)]
    raise TypeError(
        f"Ranks exchange tensors and plain data (dict, list, tuple, str, int, float, bool, None), not a "
        f"{type(value).__name__}: {value!r:.80}"
    )


def _made(described: Any, content: _Bytes) -> Any:
    if not isinstance(described, list):
        return described
    kind, *parts = described
    if kind == "tensor":
        return content.cut(*parts)
    if kind == "dict":
        return {_made(name, content): _made(value, content) for name, value in parts}
    made = [_made(part, content) for part in parts]
    return tuple(made) if kind == "tuple" else made


BUCKET = 25 << 20  # bytes that are exchanged together


def in_buckets(gradients: Sequence[Tensor], reduce: Callable[[Tensor], object]) -> None:
    """Put in the place of gradients what ``reduce`` makes of them, in tensors of 25 MB or one gradient."""
    for bucket in _buckets(gradients, lambda gradient: gradient.dtype):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        reduce(flat)
        totals = torch.split(flat, [each.numel() for each in bucket])
        for gradient, total in zip(bucket, totals, strict=True):
            gradient.copy_(total.view_as(gradient))


@torch.no_grad()
def broadcast_each(buffers: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Give tensors of any dtypes the values of the group's first rank, in messages of 25 MB or one tensor.

    A collective: the tensors are alike on all ranks, but for the devices that they lie on.
    """
    largest_first = sorted(buffers, key=lambda each: -each.dtype.itemsize)  # so each is aligned in the bytes of all
    for bucket in _buckets(largest_first, lambda each: each.device):
        flat = torch.cat([bytes_of(each) for each in bucket])
        exchanged(dist.broadcast, flat, group=group, group_src=0)
        if dist.get_rank(group) != 0:
            for each, content in zip(bucket, torch.split(flat, [each.nbytes for each in bucket]), strict=True):
                each.copy_(content.view(each.dtype).view(each.shape))


def _buckets(tensors: Sequence[Tensor], kind: Callable[[Tensor], Hashable]) -> Iterator[list[Tensor]]:
    """Yield tensors of one kind that go together."""
    for one in dict.fromkeys(map(kind, tensors)):
        bucket: list[Tensor] = []
        for tensor in tensors:
            if kind(tensor) != one:
                continue
            if bucket and sum(each.nbytes for each in bucket) + tensor.nbytes > BUCKET:
                yield bucket
                bucket = []
            bucket.append(tensor)
        yield bucket
