"""Batches of a data set in memory: many in one go, on a thread, while those before are used."""

import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice

import torch
from torch import Tensor

Rows = tuple[Tensor, ...]
"""Of some samples: inputs ``[n, ...]``, targets ``[n, ...]``, and so on."""

AT_ONCE = 8 << 20  # bytes fetched in one go, about
MOST = 64  # batches fetched in one go
GROWTH = 4  # an epoch begins with few, so that its first steps do not wait
ALIGNED = 64  # bytes: where torch has tensors begin. Some kernels round otherwise where they begin elsewhere


class Ahead:
    """Fetches batches before they are asked for. What is fetched in one go is then cut into them.

    Args:
        fetch: returns the rows of samples, int64 ``[n]``; those of each follow from itself alone.
        pin: whether to pin them in memory, from which a GPU fetches by itself.
    """

    def __init__(self, fetch: Callable[[Tensor], Rows], pin: bool) -> None:
        self._fetch = fetch
        self._pin = pin
        self._thread = ThreadPoolExecutor(1, "batches")

    def batches(self, samples: Iterator[Tensor]) -> Iterator[Rows]:
        """Yield the rows of each batch, of which ``samples`` says what is in it. There is at least one."""
        rows = self._rows(next(samples))
        unit = _unit(rows)
        most = _at_once(rows, unit)
        if most == 1:
            yield rows
            del rows  # or it would stay to the end
            yield from map(self._rows, samples)
            return
        count = min(GROWTH, most)
        coming = self._begin(list(islice(samples, count)), unit)
        yield rows
        del rows
        while coming is not None:
            sizes, fetched = coming
            count = min(GROWTH * count, most)
            coming = self._begin(list(islice(samples, count)), unit)
            yield from zip(*(torch.split(tensor, sizes)[::2] for tensor in fetched.result()), strict=True)

    def _begin(self, batches: list[Tensor], unit: int) -> tuple[list[int], "Future[Rows]"] | None:
        """Begin to fetch batches, each filled up to whole units; return how many rows are in it and in what fills it
        up, then of the next, and what will be all of these rows."""
        if not batches:
            return None
        filling = torch.zeros(unit, dtype=torch.int64)
        pieces = [piece for samples in batches for piece in (samples, filling[: -len(samples) % unit])]
        return [len(piece) for piece in pieces], self._thread.submit(self._rows, torch.cat(pieces))

    def _rows(self, samples: Tensor) -> Rows:
        rows = self._fetch(samples)
        return tuple(tensor.pin_memory() for tensor in rows) if self._pin else rows

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(cancel_futures=True)


def _unit(batch: Rows) -> int:
    """Return the number of rows after which a tensor could begin."""
    return math.lcm(*(ALIGNED // math.gcd(ALIGNED, tensor[:1].nbytes) for tensor in batch))


def _at_once(batch: Rows, unit: int) -> int:
    """Return how many batches like this one to fetch in one go."""
    filled = -(-len(batch[0]) // unit) * unit
    return max(1, min(MOST, AT_ONCE // max(1, filled * sum(tensor[:1].nbytes for tensor in batch))))
