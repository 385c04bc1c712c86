"""Sequences of any length: packed into windows of one length, or in batches of like lengths, in a computed order."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from ddp_recipes.data.loader import size_of
from ddp_recipes.data.order import Bucketed, Order, Sequential, order_of, permute
from ddp_recipes.errors import RequestError
from ddp_recipes.runtime.seeding import key
from ddp_recipes.streams.order import Windowed
from ddp_recipes.streams.reader import span

IGNORED = -100  # a target that does not count

Lengths = NDArray[np.int64]


class Packed(Dataset[Any]):
    """Windows of ``length`` tokens, filled with whole documents one after the other, cut where a window ends.

    Documents are in groups of ``group`` in their set's order. In each epoch those of a group follow each other in
    another order, and windows are cut anew; how many there are of a group stays. So each token comes once an epoch, and
    only the last window of a group is filled up. No token is to be predicted from another document.

    Args:
        dataset: map-style: documents, as sequences of token numbers, or mappings that have them as ``input_ids``.
        length: tokens of a window.
        lengths: of all documents; ``None``: the data set's ``lengths``, or each is read once to see.
        group: documents that are shuffled among each other.
        window: windows that are permuted among each other.
        named: whether a sample is a mapping as models of Hugging Face take it (``input_ids``, ``labels``,
            ``position_ids``), and not (tokens, tokens that follow): both int64 [length].

    Raises:
        RequestError: the lengths do not fit.
    """

    def __init__(
        self,
        dataset: Any,
        length: int,
        *,
        lengths: Sequence[int] | None = None,
        group: int = 1024,
        window: int = 16384,
        named: bool = False,
    ) -> None:
        if min(length, group, window) < 1:
            raise RequestError(f"length={length}, group={group}, window={window}: each has to be at least 1.")
        if callable(own := getattr(dataset, "sample_order", None)) and own(0, True).repeats:
            raise RequestError(
                f"{type(dataset).__name__} draws its samples by weights, and each document is packed once. Pack the "
                f"sets of a mixture, each by itself, and mix those."
            )
        self.dataset, self.length, self.group, self.window, self.named = dataset, length, group, window, named
        self.lengths = lengths_of(dataset, lengths)
        tokens = np.add.reduceat(self.lengths, np.arange(0, len(self.lengths), group))
        self.windows = tuple((-(-tokens // length)).tolist())  # of each group
        self._ends: list[int] = [*accumulate(self.windows)]
        self._seed: int | None = None
        self._epoch = 0

    def __len__(self) -> int:
        return self._ends[-1]

    def sample_order(self, seed: int, shuffle: bool) -> Order:
        """Return the order of windows, by groups and windows of them, or one after the other."""
        self._seed = seed if shuffle else None
        return Windowed(self.windows, seed, self.window) if shuffle else Sequential(len(self))

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next samples are of: documents of a group are in another order in each."""
        self._epoch = epoch

    def __getitem__(self, index: int) -> Any:
        number, before, _ = span(self._ends, index)
        begin = (index - before) * self.length
        documents = self._documents(number)
        ends = np.cumsum(self.lengths[documents])
        tokens = torch.zeros(self.length, dtype=torch.int64)
        following, places = torch.full_like(tokens, IGNORED), torch.zeros_like(tokens)
        for at in range(int(np.searchsorted(ends, begin, side="right")), len(documents)):
            first = int(ends[at] - self.lengths[documents[at]])  # of the document, in its group
            if first >= begin + self.length:
                break
            content = _tokens(self.dataset[int(documents[at])])
            if len(content) != self.lengths[documents[at]]:
                raise ValueError(
                    f"Document {documents[at]} has {len(content)} tokens, not {self.lengths[documents[at]]}."
                )
            start, stop = max(first, begin), min(int(ends[at]), begin + self.length)
            inside, here = slice(start - first, stop - first), slice(start - begin, stop - begin)
            tokens[here] = content[inside]
            places[here] = torch.arange(inside.start, inside.stop)
            next_ones = content[inside.start + 1 : inside.stop + 1]
            following[here][: len(next_ones)] = next_ones
        if not self.named:
            return tokens, following
        labels = torch.cat([following.new_full((1,), IGNORED), following[:-1]])  # which such models shift back
        return {"input_ids": tokens, "labels": labels, "position_ids": places}

    def _documents(self, number: int) -> NDArray[np.int64]:
        """Return the documents of a group, as they follow each other in this epoch."""
        first = number * self.group
        count = min(self.group, len(self.lengths) - first)
        places = np.arange(count, dtype=np.uint64)
        if self._seed is not None:
            places = permute(places, count, key(self._seed, self._epoch, number))
        return places.astype(np.int64) + first


class LengthBuckets(Dataset[Any]):
    """A data set whose batches have samples of like length, so that little is padded.

    Args:
        dataset: map-style; one that brings an order of its own keeps it, window by window.
        batch: samples of a global batch, as in ``data.global_batch_size``.
        lengths: as in :class:`Packed`.
        window: batches that are sorted together.
    """

    def __init__(self, dataset: Any, batch: int, *, lengths: Sequence[int] | None = None, window: int = 64) -> None:
        if min(batch, window) < 1:
            raise RequestError(f"batch={batch}, window={window}: each has to be at least 1.")
        self.dataset, self.batch, self.window = dataset, batch, window * batch
        self.lengths = lengths_of(dataset, lengths)

    def __len__(self) -> int:
        return len(self.dataset)

    def sample_order(self, seed: int, shuffle: bool) -> Order:
        """Return the order of batches of like length; without ``shuffle`` the data set's own."""
        order = order_of(self.dataset, seed, shuffle)
        return Bucketed(order, self.lengths, self.batch, self.window, seed) if shuffle else order

    def set_epoch(self, epoch: int) -> None:
        """Tell the data set which epoch the next samples are of, if it asks for that."""
        if callable(tell := getattr(self.dataset, "set_epoch", None)):
            tell(epoch)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


def lengths_of(dataset: Any, given: Sequence[int] | None) -> Lengths:
    """Return how many tokens each sample has: as given, as the data set says, or as it is read.

    Raises:
        RequestError: they are not as many as samples, or there is no token.
    """
    size, own = size_of(dataset), getattr(dataset, "lengths", None)
    found = given if given is not None else own
    if found is None:
        found = [len(_tokens(dataset[index])) for index in range(size)]
    lengths = np.asarray(found, dtype=np.int64)
    if lengths.shape != (size,) or (lengths < 0).any() or not lengths.any():
        raise RequestError(
            f"lengths has {lengths.size} numbers, for {size} samples of {type(dataset).__name__}. Needed: one "
            f"for each, at least 0, not all 0."
        )
    return lengths


def _tokens(sample: Any) -> Tensor:
    """Return the tokens of a document."""
    if isinstance(sample, Mapping):
        sample = sample["input_ids"]
    elif isinstance(sample, tuple):
        sample = sample[0]
    tokens: Tensor = torch.as_tensor(sample)
    return tokens.long().flatten()
