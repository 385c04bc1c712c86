"""What writes an event file."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


def file_writer(writer: "SummaryWriter") -> Any:
    """Return the writer of events with times of their own: ``_get_file_writer()``, or the public ``file_writer``."""
    get = getattr(writer, "_get_file_writer", None)
    return writer.file_writer if get is None else get()
