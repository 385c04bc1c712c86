"""Joins the ranks that torchrun, or anything that sets its variables, started. Loads torch when it launches."""

import os
from dataclasses import dataclass
from typing import ClassVar, Literal

from ddp_recipes.config.extras import extra
from ddp_recipes.config.settings import LauncherSettings
from ddp_recipes.errors import RequestError
from ddp_recipes.launchers.base import Resources
from ddp_recipes.launchers.reports import as_rank_0
from ddp_recipes.reporting.run_directory import Summary
from ddp_recipes.runtime.job import Job


@dataclass(frozen=True, kw_only=True)
class EnvSettings(LauncherSettings):
    """``launcher.*`` of ``launcher=env``."""

    name: Literal["env"]


@dataclass(frozen=True)
class EnvLauncher:
    """Runs a job as rank 0, and has the followers run it, too."""

    settings_class: ClassVar[type[LauncherSettings]] = EnvSettings
    settings: LauncherSettings
    resources: Resources

    def launch(self, job: Job) -> Summary:
        world = self.resources.world
        if world is None:
            raise RequestError(
                "launcher=env joins processes that are already running, but RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR "
                "and MASTER_PORT are not set. Start with torchrun, srun or mpirun, or use launcher=local."
            )
        for name in ("max_restarts", "replace_ranks"):
            if number := getattr(self.settings, name):
                raise RequestError(
                    f"launcher.{name}={number}, but these processes were not started by ddp_recipes, which cannot "
                    f"start them again: use torchrun --max-restarts."
                )
        if "SLURM_STEP_ID" in os.environ:
            extra("the layout of a step of Slurm")(world, self.settings, os.environ)
        with as_rank_0():
            return self.resources.channel.lead(job)
