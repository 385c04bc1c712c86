"""The processes of a ``DataLoader``."""

from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data._utils import worker


def shut_down(loader: "DataLoader[Any] | None") -> None:
    """End the persistent data workers of a loader now, if it has any.

    Their iterator's ``_shutdown_workers``. Without them they end with the loader, which is the public
    way, and takes up to five seconds each at the interpreter's end.
    """
    end = getattr(persistent(loader), "_shutdown_workers", None)
    if end is not None:
        end()


def workers_of(iterator: Any) -> tuple[list[BaseProcess], int]:
    """Return the data workers of a loader's iterator, and the number of that from which the next batch is to come.

    Its ``_workers``, ``_task_info`` and ``_rcvd_idx``.
    """
    return list(getattr(iterator, "_workers", ())), iterator._task_info.get(iterator._rcvd_idx, (0,))[0]


def persistent(loader: "DataLoader[Any] | None") -> Any:
    """Return the iterator that a loader with persistent workers keeps, ``DataLoader._iterator``, or ``None``."""
    return getattr(loader, "_iterator", None)


class _Noticing:
    """Stands for torch's ``WorkerInfo`` in a data worker, and notices who asks for its number."""

    def __init__(self, info: Any, dataset: Any) -> None:
        self._info, self.dataset, self.asked = info, dataset, False

    @property
    def id(self) -> int:
        self.asked = True
        return int(self._info.id)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._info, name)


def notice_numbers(dataset: Any) -> Callable[[], bool]:
    """Return in a data worker whether a data set has asked which worker it is in: then it gives a part of itself.

    ``get_worker_info()`` returns what is in ``torch.utils.data._utils.worker._worker_info``; its ``dataset`` is this.
    """
    noticing = _Noticing(worker._worker_info, dataset)
    worker._worker_info = noticing  # type: ignore[assignment]
    return lambda: noticing.asked
