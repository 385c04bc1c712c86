"""Text as bytes, mapped from disk: a sample is a window of it and the same window one byte on."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from ddp_recipes.errors import RequestError

VOCABULARY = 256  # the bytes of UTF-8


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of ``context`` bytes one after the other, int64 ``[context]``, with the bytes that follow each.

    Args:
        texts: uint8, ``[bytes]`` each; no window goes from one into the next.
    """

    batched = True

    def __init__(self, texts: Sequence[NDArray[np.uint8]], context: int) -> None:
        self.texts, self.context = texts, context
        self._ends = np.cumsum([max(0, len(text) - 1) // context for text in texts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.fetch(torch.tensor([index]))
        return inputs[0], targets[0]

    def fetch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return windows and what follows, int64 ``[n, context]`` each, of the samples ``indices`` (int64, ``[n]``)."""
        numbers = indices.numpy()
        of_text = np.searchsorted(self._ends, numbers, side="right")
        windows = np.empty((len(numbers), self.context + 1), dtype=np.int64)
        for row, (number, text) in enumerate(zip(numbers, of_text, strict=True)):
            start = (number - (self._ends[text - 1] if text else 0)) * self.context
            windows[row] = self.texts[text][start : start + self.context + 1]
        found = torch.from_numpy(windows)
        return found[:, :-1].contiguous(), found[:, 1:].contiguous()


class Prompts(Dataset[Tensor]):
    """One prompt several times, to be continued: int64 ``[bytes]``."""

    def __init__(self, prompt: str, samples: int) -> None:
        self.tokens = encode(prompt)
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Tensor:
        return self.tokens


def encode(text: str) -> Tensor:
    """Return the bytes of a text, int64 ``[bytes]``.

    Raises:
        RequestError: there are none.
    """
    if not text:
        raise RequestError("data.prompt is empty: give at least one character to go on from.")
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()


def decode(tokens: Tensor) -> str:
    """Return bytes as text; what is no UTF-8 becomes a replacement character."""
    return bytes(tokens.to(torch.uint8).tolist()).decode(errors="replace")


def text(path: str | None, context: int, split: str, val_fraction: float = 0.1) -> Windows:
    """Return the training or the validation part of a text: of each file its beginning, or its end.

    Args:
        path: a file, or a folder of which all files count, in the order of their names; ``None`` for the topics of
            Python's own ``help()``, half a megabyte of English.
        split: ``train`` or ``val``.

    Raises:
        RequestError: there is nothing at ``path``, or no window in a part.
    """
    if not 0 <= val_fraction <= 1:
        raise RequestError(f"data.val_fraction={val_fraction} is no fraction. Allowed: from 0 to 1, such as 0.1.")
    texts = [_python_topics()] if path is None else [_mapped(file) for file in _files(Path(path).expanduser())]
    starts = [len(each) - int(len(each) * val_fraction) for each in texts]
    parts = [each[:at] if split == "train" else each[at:] for each, at in zip(texts, starts, strict=True)]
    windows = Windows(parts, context)
    if not len(windows):
        raise RequestError(
            f"data.path={path} has {sum(map(len, texts)):,} bytes, of which {split} gets {sum(map(len, parts)):,}: no "
            f"window of data.context={context} and a byte that follows. Use a smaller context, another "
            f"data.val_fraction, or more text."
        )
    return windows


def _files(path: Path) -> list[Path]:
    found = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    if not found or not found[0].is_file():  # to open a pipe would wait for ever
        raise RequestError(f"data.path={path} has no file, or is none. Give a text file, or a folder of them.")
    return found


def _mapped(file: Path) -> NDArray[np.uint8]:
    size = file.stat().st_size
    return np.memmap(file, dtype=np.uint8, mode="r") if size else np.empty(0, dtype=np.uint8)


def _python_topics() -> NDArray[np.uint8]:
    from pydoc_data.topics import topics

    return np.frombuffer("\n\n".join(topics[name] for name in sorted(topics)).encode(), dtype=np.uint8)
