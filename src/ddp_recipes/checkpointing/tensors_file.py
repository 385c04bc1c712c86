"""safetensors files, written as they come: no more than a block is held."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ddp_recipes._compat.tensors import bytes_of
from ddp_recipes.devices import is_accelerator, page_locked
from ddp_recipes.runtime.rows import Source

BLOCK = 4 << 20  # bytes, a multiple of the disk's own blocks: direct writes have to be
NAMES = {  # https://github.com/huggingface/safetensors#format
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8"},
    **{torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.bool: "BOOL", torch.complex64: "C64"},
    **{torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64"},
}
DTYPES = {name: dtype for dtype, name in NAMES.items()}


def size_in_file(value: Tensor | Source) -> int:
    """Return the bytes that a tensor takes."""
    return value.shape.numel() * value.dtype.itemsize


def stream(tensors: Mapping[str, Tensor | Source]) -> Iterator[memoryview]:
    """Yield a safetensors file with these tensors piece by piece: the header first, then what is in them.

    A piece may be overwritten once the one after the next is asked for.

    Raises:
        TypeError: the format has no word for a dtype.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))  # so each is aligned
    end = 0
    for name in names:
        value = tensors[name]
        if value.dtype not in NAMES:
            raise TypeError(f"{name} is of {value.dtype}, for which safetensors has no name.")
        begin, end = end, end + size_in_file(value)
        header[name] = {"dtype": NAMES[value.dtype], "shape": [*value.shape], "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    rooms = _Rooms()
    for name in names:
        for piece in _pieces(tensors[name]):
            content = bytes_of(piece)
            for at in range(0, len(content), BLOCK):
                flat: Any = rooms.host(content[at : at + BLOCK]).numpy()
                yield memoryview(flat)


class _Rooms:
    """Two blocks of page-locked memory in turns, through which bytes leave an accelerator."""

    def __init__(self) -> None:
        self._rooms: list[Tensor] = []

    def host(self, content: Tensor) -> Tensor:
        """Return bytes on the host, uint8 [bytes]: those that are there already as they are."""
        if not is_accelerator(content.device):
            return content
        room = self._rooms.pop(0) if len(self._rooms) == 2 else page_locked(BLOCK)
        self._rooms.append(room)
        return room[: len(content)].copy_(content)


def _pieces(value: Tensor | Source) -> Iterator[Tensor]:
    """Yield a tensor, or rows of it that are not in memory yet."""
    if isinstance(value, Tensor):
        yield value
        return
    rows = value.shape[0]
    each = max(1, BLOCK * rows // max(1, size_in_file(value)))
    for start in range(0, rows, each):
        yield value.rows(start, min(start + each, rows))
