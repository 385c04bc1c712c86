"""Pictures of a model in stages, for the run directory: what each stage holds, and when each works."""

import logging
from collections.abc import Sequence
from pathlib import Path

from ddp_recipes.config.parallelism import PipelineShape
from ddp_recipes.loggers import Logger
from ddp_recipes.model_parallel.split import Stage
from ddp_recipes.model_parallel.timeline import cells_of
from ddp_recipes.reporting.figures import leave_picture
from ddp_recipes.reporting.figures.schedule import draw_schedule
from ddp_recipes.reporting.figures.split import draw_split

log = logging.getLogger(__name__)


def leave_split(directory: Path, logger: Logger, name: str, stages: Sequence[Stage]) -> None:
    """Leave ``split.png``, or say why there is none."""
    if stages[0].time is None:
        log.info("There is no split.png: what blocks cost is known from trying the split out, which failed.")
        return
    caption = f"{name} over {len(stages)} devices: each replica's blocks and what they take"
    leave_picture(directory, logger, "split", lambda: draw_split(stages, caption))


def leave_schedule(directory: Path, logger: Logger, pipeline: PipelineShape) -> None:
    """Leave ``schedule.png``."""
    title = f"{pipeline.schedule}, {pipeline.micro_batches} micro-batches"
    leave_picture(directory, logger, "schedule", lambda: draw_schedule(cells_of(pipeline), title))
