"""The processes of a ``DataLoader``."""

from typing import Any

from torch.utils.data import DataLoader


def shut_down(loader: "DataLoader[Any] | None") -> None:
    """End the persistent data workers of a loader now, if it has any.

    ``DataLoader._iterator`` and its ``_shutdown_workers``. Without them they end with the loader, which is the public
    way, and takes up to five seconds each at the interpreter's end.
    """
    end = getattr(getattr(loader, "_iterator", None), "_shutdown_workers", None)
    if end is not None:
        end()
