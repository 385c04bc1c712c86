"""Ranks on this machine: ``launcher=local``."""

from ddp_recipes.launchers.local.launcher import (
    AFTER_FAILURE_S,
    AFTER_INTERRUPT_S,
    AFTER_TERM_S,
    LocalLauncher,
    LocalSettings,
    run_here,
)

__all__ = ["AFTER_FAILURE_S", "AFTER_INTERRUPT_S", "AFTER_TERM_S", "LocalLauncher", "LocalSettings", "run_here"]
