"""SHA-256 over nested plain data and tensors: the same content gives the same digest, wherever it lives."""

import ctypes  # a tensor that was once NumPy's never changes its size again, as observers' buffers do
import hashlib
from typing import Any

import torch

from ddp_recipes._compat.tensors import bytes_of


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
