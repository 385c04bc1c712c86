"""Callbacks: what a run may be given besides the loop."""

from typing import TYPE_CHECKING

from ddp_recipes._lazy import on_use

if TYPE_CHECKING:
    from ddp_recipes.callbacks.base import Callback as Callback

_HOMES = {
    "Callback": ".base",
    "Profiler": "ddp_recipes.tools.profiling",  # where it was before
}
__all__ = [*_HOMES]
__getattr__ = on_use(__name__, _HOMES, found=True)
