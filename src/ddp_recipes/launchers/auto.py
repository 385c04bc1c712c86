"""The default launcher: joins the ranks that are available, else starts local ones."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from ddp_recipes.config.settings import LauncherSettings
from ddp_recipes.launchers.base import Resources
from ddp_recipes.launchers.env import EnvLauncher
from ddp_recipes.launchers.local import LocalLauncher
from ddp_recipes.reporting.run_directory import Summary
from ddp_recipes.runtime.job import Job


@dataclass(frozen=True, kw_only=True)
class AutoSettings(LauncherSettings):
    """``launcher.*`` of ``launcher=auto``; another ``name`` chooses that launcher."""

    name: Literal["auto", "local", "env", "slurm"]


@dataclass(frozen=True)
class AutoLauncher:
    """Runs a job with ``env`` in a process that is one of several ranks, else with ``local``."""

    settings_class: ClassVar[type[LauncherSettings]] = AutoSettings
    settings: LauncherSettings
    resources: Resources

    def launch(self, job: Job) -> Summary:
        """Run a job and return rank 0's summary."""
        chosen = LocalLauncher if self.resources.world is None else EnvLauncher
        return chosen(self.settings, self.resources).launch(job)
