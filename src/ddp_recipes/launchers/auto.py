"""The launcher that is taken where none is chosen. A rank checks its keys, and so loads no launcher."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from ddp_recipes.config.settings import LauncherSettings, launcher_class

if TYPE_CHECKING:
    from ddp_recipes.launchers.base import Resources
    from ddp_recipes.reporting.run_directory import Summary
    from ddp_recipes.runtime.job import Job


@dataclass(frozen=True, kw_only=True)
class AutoSettings(LauncherSettings):
    """``launcher.*`` of ``launcher=auto``; another ``name`` chooses that launcher."""

    name: Literal["auto", "local", "env", "slurm", "nodes"]


@dataclass(frozen=True)
class AutoLauncher:
    """The default: ``env`` in a process that is one of several ranks, else ``local``."""

    settings_class: ClassVar[type[LauncherSettings]] = AutoSettings
    settings: LauncherSettings
    resources: "Resources"

    def launch(self, job: "Job") -> "Summary":
        """Run a job and return rank 0's summary."""
        chosen = launcher_class({"name": "local" if self.resources.world is None else "env"})
        summary: Summary = chosen(self.settings, self.resources).launch(job)
        return summary
