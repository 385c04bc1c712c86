"""Cut a model into stages, on the devices of a process or in several processes."""

from functools import partial
from typing import TYPE_CHECKING

from ddp_recipes.build.devices import Devices
from ddp_recipes.config.parallelism import StrategySettings
from ddp_recipes.config.settings import ModelSettings
from ddp_recipes.data.loader import Loader
from ddp_recipes.model_parallel import DryRun, apart, as_dict, refuse_counts, split_model, timed
from ddp_recipes.reporting.figures.split import leave_split
from ddp_recipes.training.precision import Precision

if TYPE_CHECKING:
    from ddp_recipes.build.model import BuiltTask, Times


def split(
    built: "BuiltTask",
    settings: ModelSettings,
    strategy: StrategySettings,
    devices: Devices,
    loader: Loader,
    step: str,
    precision: Precision,
    times: "Times",
) -> None:
    """Cut the model of a task, and place its stages where they are in this process.

    Args:
        loader: gives a sample to try the split out on.
        step: the task's method to try out.
        times: returns on every rank what a function measures on rank 0.

    Raises:
        RequestError: the model cannot be cut so.
    """
    dry_run = DryRun(built.task, step, lambda size: as_dict(loader.sample(size)), loader.plan.size(0, 0))
    names = [str(name) for name in settings.split] if isinstance(settings.split, list) else None
    if settings.split == "timed" and devices.layout is None:
        dry_run.times = partial(times, partial(timed, dry_run, devices.own[0], precision.forward))
    elif settings.split == "timed":
        built.warnings.append(
            "model.split=timed: in a dry run there is no device to time on, so stages are even as with auto."
        )
    if (pipeline := strategy.pipeline) is not None:  # the task stays on the CPU: no device may have room for all of it
        refuse_counts(dry_run.batch_of)
        built.starts, built.stages = apart(built.task.model, pipeline.stages, names, dry_run, pipeline.stages_key)
    else:
        built.stages = split_model(built.task, devices.own, names, dry_run)
    name = type(built.task.model).__name__
    built.pictures.append(lambda directory, logger: leave_split(directory, logger, name, built.stages))
    if dry_run.failure is not None:
        what = "the split is not tried out"
        if pipeline is not None:
            what = "what blocks compute is not known, and model.split=auto goes by their weights alone"
        built.warnings.append(f"Before training {what}: a step without data failed ({dry_run.failure}).")
