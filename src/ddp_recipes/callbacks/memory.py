"""Where allocations on an accelerator come from, for the snapshot that a run leaves when memory is exhausted."""

from pathlib import Path

from torch import nn

from ddp_recipes.callbacks.base import Callback
from ddp_recipes.devices import record_memory_history

__all__ = ["MemoryHistory"]


class MemoryHistory(Callback):
    """Has the allocator note the Python stacks of its latest allocations, which takes a few microseconds for each.

    Args:
        max_entries: how many it keeps.
    """

    def __init__(self, max_entries: int = 100_000) -> None:
        self.max_entries = max_entries

    def on_start(self, directory: Path | None, task: nn.Module) -> None:
        record_memory_history(self.run.devices[0], self.max_entries)
