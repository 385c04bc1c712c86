"""Batches of a data set in memory: many in one go, on a thread, while those before are used."""

import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor
from torch.nn.functional import pad

Rows = tuple[Tensor, ...]
"""Of some samples: inputs ``[n, ...]``, targets ``[n, ...]``, and so on."""

AT_ONCE = 8 << 20  # bytes fetched in one go, about
MOST = 64  # batches fetched in one go
GROWTH = 16  # an epoch begins with fewer, so that its second step does not wait long
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

    def batches(self, samples: Callable[[int], Tensor]) -> Iterator[Rows]:
        """Yield the rows of each batch.

        Args:
            samples: returns those of the next so many batches, or of fewer: int64 ``[batches, n]``. There is at least
                one, and none at the end.
        """
        rows = self._rows(samples(1)[0])
        unit = _unit(rows)
        most = _at_once(rows, unit)
        count = min(GROWTH, most)
        coming = self._begin(samples(count), unit)
        yield rows
        del rows  # or it would stay to the end
        while coming is not None:
            size, fetched = coming
            count = min(GROWTH * count, most)
            coming = self._begin(samples(count), unit)
            yield from zip(*(_cut(tensor, size, unit) for tensor in fetched.result()), strict=True)

    def _begin(self, batches: Tensor, unit: int) -> tuple[int, "Future[Rows]"] | None:
        """Begin to fetch batches, each filled up to whole units; return their size, and what will be all their rows."""
        if not len(batches):
            return None
        size = batches.shape[1]
        filled = pad(batches, (0, -size % unit)).flatten()
        return size, self._thread.submit(self._rows, filled)

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


def _cut(rows: Tensor, size: int, unit: int) -> tuple[Tensor, ...]:
    """Return the batches that were fetched, without what filled them up."""
    filled = -(-size // unit) * unit
    return rows.view(-1, filled, *rows.shape[1:])[:, :size].unbind()
