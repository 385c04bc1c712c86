"""Where a step's time goes."""

from collections.abc import Mapping

from ddp_recipes.reporting.figures import as_png


def draw_profile(times: Mapping[str, float], title: str) -> bytes:
    """Return a PNG with a bar for each phase of a step, whose ``times`` are in ms."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1 + 0.35 * len(times)), layout="constrained")
    axis = figure.add_subplot()
    bars = axis.barh(list(times), list(times.values()), height=0.7, color="#3b6ea8")
    step = sum(times.values())
    axis.bar_label(bars, [f"{took:.3f} ms, {took / step:.0%}" for took in times.values()], padding=4, fontsize=9)
    axis.set_xlim(0, 1.25 * max(times.values()))
    axis.invert_yaxis()
    axis.set_title(title, fontsize=11, loc="left")
    axis.tick_params(length=0)
    axis.xaxis.set_visible(False)
    axis.spines[["top", "right", "bottom"]].set_visible(False)
    return as_png(figure)
