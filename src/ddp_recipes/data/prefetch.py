"""Prefetch of a data set in memory: many batches in one go, on a thread, while those before are used."""

import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor
from torch.nn.functional import pad

Rows = tuple[Tensor, ...]
"""Of some samples: inputs ``[n, ...]``, targets ``[n, ...]``, and so on."""

CHUNK_BYTES = 8 << 20  # fetched in one go, about
MAX_BATCHES = 64  # likewise
GROWTH = 16  # an epoch begins with fewer, so that its second step does not wait long
ALIGNED = 64  # bytes: where torch has tensors begin. Some kernels round otherwise where they begin elsewhere


class Prefetcher:
    """Fetches several batches in one go before they are needed, and cuts them apart.

    Args:
        fetch: returns the rows of samples, int64 ``[n]``; those of each follow from itself alone.
        pin: whether to pin them in memory, from which a GPU fetches by itself.
    """

    def __init__(self, fetch: Callable[[Tensor], Rows], pin: bool) -> None:
        self._fetch = fetch
        self._pin = pin
        self._thread = ThreadPoolExecutor(1, "prefetch")

    def batches(self, samples: Callable[[int], Tensor]) -> Iterator[Rows]:
        """Yield the rows of each batch.

        Args:
            samples: returns those of the next so many batches, or of fewer: int64 ``[batches, n]``. There is at least
                one, and none at the end.
        """
        rows = self._rows(samples(1)[0])
        size, bytes_a_row = len(rows[0]), [tensor[:1].nbytes for tensor in rows]
        padding = -size % math.lcm(*(ALIGNED // math.gcd(ALIGNED, count) for count in bytes_a_row))
        most = max(1, min(MAX_BATCHES, CHUNK_BYTES // max(1, (size + padding) * sum(bytes_a_row))))
        count = min(GROWTH, most)
        pending = self._submit(samples(count), padding)
        yield rows
        del rows  # or it would stay to the end
        while pending is not None:
            fetched = pending
            count = min(GROWTH * count, most)
            pending = self._submit(samples(count), padding)
            yield from fetched.result()

    def _submit(self, batches: Tensor, padding: int) -> "Future[list[Rows]] | None":
        return self._thread.submit(self._chunk, batches, padding) if len(batches) else None

    def _chunk(self, batches: Tensor, padding: int) -> list[Rows]:
        """Return the rows of each batch; what pads them in between lets each begin where a tensor would."""
        size = batches.shape[1]
        rows = self._rows(pad(batches, (0, padding)).flatten())
        columns = (each.view(-1, size + padding, *each.shape[1:])[:, :size].unbind() for each in rows)
        return list(zip(*columns, strict=True))

    def _rows(self, samples: Tensor) -> Rows:
        rows = self._fetch(samples)
        return tuple(tensor.pin_memory() for tensor in rows) if self._pin else rows

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(cancel_futures=True)
