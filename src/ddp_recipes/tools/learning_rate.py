"""A learning rate to begin with: ``tune=lr`` raises it from step to step and looks where the loss falls fastest."""

import logging
import math
from collections.abc import Iterator, Sequence
from functools import partial

from torch import Tensor

from ddp_recipes.build.recipe import Recipe
from ddp_recipes.build.run import make_optimizer, make_run, make_stop_controller
from ddp_recipes.errors import RequestError, RunFailed
from ddp_recipes.output import Output
from ddp_recipes.reporting.figures import as_png, leave_picture
from ddp_recipes.training.loop import advance
from ddp_recipes.training.metrics import mean_loss
from ddp_recipes.training.state import Run

log = logging.getLogger(__name__)

LOWEST, HIGHEST = 1e-7, 10.0
SMOOTHING = 0.9  # of the loss, an exponential average
DIVERGED = 4.0  # times the lowest loss


def tune(recipe: Recipe, output: Output) -> None:
    """Take ``tune_steps`` optimizer steps with rising rates, as the run would; show the loss and a rate to begin with.

    Losses are of all ranks' samples, so all ranks stop at the same step and find the same rate.

    Raises:
        RequestError: the module brings its own optimizer, or the config's has no ``lr``.
        RunFailed: the loss does not fall.
    """
    base = recipe.job.config["optimizer"].get("lr")
    if recipe.task.configure_optimizers() is not None or not isinstance(base, (int, float)) or base <= 0:
        raise RequestError(
            f"tune=lr looks for optimizer.lr, which is {base}, or not used where {type(recipe.task.model).__name__} "
            f"brings its own optimizer. Leave tune out, or set optimizer.lr above 0."
        )
    run = make_run(recipe, make_stop_controller(recipe))
    (run.optimizers,) = recipe.strategy.make_optimizers(  # no schedule began
        recipe.task, lambda: ([make_optimizer(recipe.job.config, recipe.task, recipe.may_fuse)],)
    )
    run.schedules = []
    output.open(None)
    steps = recipe.request.run.tune_steps or 100
    rates, losses = search(run, steps, float(base))
    slopes = [losses[at + 1] - losses[at - 1] for at in range(1, len(losses) - 1)]
    if not slopes or min(slopes) >= 0:
        raise RunFailed(
            f"The loss falls at no learning rate from {LOWEST:g} to {rates[-1]:.2g}. Look at the data and the model, "
            f"or take more steps, tune_steps={2 * steps}."
        )
    chosen = rates[1 + slopes.index(min(slopes))]
    for step, (rate, loss) in enumerate(zip(rates, losses, strict=True), start=1):
        output.logger.scalars({"tune/rate": rate, "tune/loss": loss}, step)
    output.metrics = {"tune/lr": chosen}
    title = f"{type(recipe.task.model).__name__}: where the loss falls fastest"
    if recipe.world.is_main:
        leave_picture(
            recipe.job.directory, output.logger, "lr_finder", partial(draw_learning_rates, rates, losses, chosen, title)
        )
    log.info("The loss falls fastest at optimizer.lr=%.2g, of %d rates up to %.2g.", chosen, len(rates), rates[-1])


def search(run: Run, steps: int, base: float) -> tuple[list[float], list[float]]:
    """Return the rates that were tried and the smoothed loss at each, up to where it diverged.

    Each parameter group's rate stays in its relation to ``base``.
    """
    factors = [group["lr"] / base for group in run.optimizer.param_groups]
    rates: list[float] = []
    losses: list[float] = []
    average, taken = 0.0, stepped(run)
    for step in range(steps):
        rate = LOWEST * (HIGHEST / LOWEST) ** (step / (steps - 1))
        for group, factor in zip(run.optimizer.param_groups, factors, strict=True):
            group["lr"] = rate * factor
        loss = next(taken).item()
        average = SMOOTHING * average + (1 - SMOOTHING) * loss
        smoothed = average / (1 - SMOOTHING ** (step + 1))
        if not math.isfinite(loss) or (losses and smoothed > DIVERGED * min(losses)):
            break
        rates.append(rate)
        losses.append(smoothed)
    return rates, losses


def stepped(run: Run) -> Iterator[Tensor]:
    """Take optimizer steps without an end; yield the loss of each, over all ranks."""
    while True:
        epoch = run.cursor.epoch
        batches = run.train.batches(epoch, run.cursor.batch, run.trainer.accumulate_grad_batches)
        while run.cursor.epoch == epoch:
            update = run.update(run, batches, False)
            advance(run, update.samples)
            yield mean_loss(run, update.losses, update.samples)


def draw_learning_rates(rates: Sequence[float], losses: Sequence[float], chosen: float, title: str) -> bytes:
    """Return a PNG with the smoothed loss at each rate, and the chosen rate marked."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axis = figure.add_subplot()
    axis.plot(rates, losses, color="#3b6ea8")
    axis.axvline(chosen, color="#b3261e", linewidth=1)
    axis.annotate(f" {chosen:.2g}", (chosen, max(losses)), color="#b3261e", va="top")
    axis.set_xscale("log")
    axis.set_xlabel("learning rate")
    axis.set_ylabel("loss, smoothed")
    axis.set_title(title, fontsize=11, loc="left")
    axis.spines[["top", "right"]].set_visible(False)
    return as_png(figure)
