"""Where the time of a run's steps goes: ``debug=profiler``."""

from ddp_recipes.tools.profiling.profiler import Profiler

__all__ = ["Profiler"]
