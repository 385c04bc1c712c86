"""Where a step's time goes, for a run with a ``Profiler``."""

from ddp_recipes.tools.profiling.record import record

__all__ = ["record"]
