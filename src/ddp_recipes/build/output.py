"""What a recipe's run shows and leaves behind."""

from functools import partial

from ddp_recipes.build.loggers import make_logger
from ddp_recipes.build.recipe import Recipe
from ddp_recipes.output import Output
from ddp_recipes.reporting.run_directory import RunDirectory


def make_output(recipe: Recipe, directory: RunDirectory | None) -> Output:
    """Return the output of a run, which is not open yet.

    Args:
        directory: the claimed run directory on rank 0, ``None`` elsewhere.
    """
    request, world, strategy = recipe.request, recipe.world, recipe.strategy
    return Output(
        job=recipe.job,
        request=request,
        world=world,
        control=recipe.control,
        directory=directory,
        task=recipe.task,
        strategy=strategy,
        stages=recipe.stages,
        pictures=recipe.pictures,
        replicas=recipe.replicas,
        devices_per_replica=recipe.devices_per_replica,
        device_name=recipe.devices.name,
        backend=recipe.devices.backend,
        monitor=recipe.monitor,
        total_steps=recipe.total_steps if recipe.mode == "fit" else None,
        state=recipe.state,
        checkpoint_path=recipe.checkpoint_path,
        resumes_in_place=recipe.resumes_in_place,
        warnings=recipe.warnings,
        make_logger=partial(make_logger, recipe.loggers, recipe.job.directory),
        logs_graph=any(node.get("graph", False) for node in recipe.loggers.values()),
    )
