"""Ranks on this machine: ``launcher=local``."""

from ddp_recipes.launchers.local.launcher import LocalLauncher, LocalSettings, run_here
from ddp_recipes.launchers.local.supervisor import AFTER_FAILURE_S, AFTER_INTERRUPT_S, AFTER_TERM_S

__all__ = ["AFTER_FAILURE_S", "AFTER_INTERRUPT_S", "AFTER_TERM_S", "LocalLauncher", "LocalSettings", "run_here"]
