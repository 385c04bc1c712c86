"""Where a step's time goes. Nothing of it is called in a run without a ``Profiler``."""

from ddp_recipes.tools.profiling.record import record

__all__ = ["record"]
