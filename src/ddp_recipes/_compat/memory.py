"""What a type of device knows of its allocator: ``_dump_snapshot`` and ``_record_memory_history`` of its module.

Types that have neither do nothing.
"""

from pathlib import Path
from typing import Any


def dump_snapshot(device_module: Any, path: Path) -> bool:
    """Write what is allocated, for https://pytorch.org/memory_viz; return whether the type of device can."""
    dump = getattr(getattr(device_module, "memory", None), "_dump_snapshot", None)
    if dump is not None:
        dump(str(path))
    return dump is not None


def record_history(device_module: Any, entries: int | None) -> None:
    """Note where so many of the latest allocations come from, for the snapshot; ``None``: no longer."""
    record = getattr(getattr(device_module, "memory", None), "_record_memory_history", None)
    if record is not None:
        record(enabled=None) if entries is None else record(max_entries=entries)
