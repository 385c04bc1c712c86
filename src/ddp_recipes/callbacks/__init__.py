"""Callbacks: what a run may be given besides the loop."""

from typing import TYPE_CHECKING

from ddp_recipes._lazy import on_use

if TYPE_CHECKING:
    from ddp_recipes.callbacks.base import Callback as Callback

_HOMES = {
    ".base": ["Callback"],
    "ddp_recipes.tools.profiling": ["Profiler"],  # which was here before
}
__all__ = [name for names in _HOMES.values() for name in names]
__getattr__ = on_use(__name__, _HOMES, found=True)
