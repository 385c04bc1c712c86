"""The loss over the learning rates that a search tried."""

from collections.abc import Sequence

from ddp_recipes.reporting.figures import as_png


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
