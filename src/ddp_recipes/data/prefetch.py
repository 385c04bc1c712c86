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
        size, bytes_a_row = len(rows[0]), [tensor[:1].nbytes for tensor in rows]
        filling = -size % math.lcm(*(ALIGNED // math.gcd(ALIGNED, count) for count in bytes_a_row))
        most = max(1, min(MOST, AT_ONCE // max(1, (size + filling) * sum(bytes_a_row))))
        count = min(GROWTH, most)
        coming = self._begin(samples(count), filling)
        yield rows
        del rows  # or it would stay to the end
        while coming is not None:
            fetched = coming
            count = min(GROWTH * count, most)
            coming = self._begin(samples(count), filling)
            yield from fetched.result()

    def _begin(self, batches: Tensor, filling: int) -> "Future[list[Rows]] | None":
        """Begin to fetch batches, if there are any."""
        return self._thread.submit(self._each, batches, filling) if len(batches) else None

    def _each(self, batches: Tensor, filling: int) -> list[Rows]:
        """Return the rows of each batch, filled up in between so that each begins where a tensor could."""
        rows = self._rows(pad(batches, (0, filling)).flatten())
        return list(zip(*(_cut(tensor, batches.shape[1], filling) for tensor in rows), strict=True))

    def _rows(self, samples: Tensor) -> Rows:
        rows = self._fetch(samples)
        return tuple(tensor.pin_memory() for tensor in rows) if self._pin else rows

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(cancel_futures=True)


def _cut(rows: Tensor, size: int, filling: int) -> tuple[Tensor, ...]:
    """Return the batches that were fetched, without what filled them up."""
    return rows.view(-1, size + filling, *rows.shape[1:])[:, :size].unbind()
