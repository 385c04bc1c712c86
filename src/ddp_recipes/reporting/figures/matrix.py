"""How often which class was taken for which."""

from collections.abc import Sequence

from ddp_recipes.reporting.figures import as_png

READABLE = 20  # classes: in more, numbers cannot be read


def draw_matrix(rows: Sequence[Sequence[float]], title: str) -> bytes:
    """Return a PNG of a confusion matrix: a row for each class of the targets, a column for each of the outputs."""
    from matplotlib.figure import Figure

    count, total = len(rows), [sum(row) or 1 for row in rows]
    fractions = [[value / total[at] for value in row] for at, row in enumerate(rows)]
    side = min(10, 2 + 0.4 * count)
    figure = Figure(figsize=(side, side), layout="constrained")
    axis = figure.add_subplot()
    axis.imshow(fractions, cmap="Blues", vmin=0, vmax=1)
    if count <= READABLE:
        axis.set_xticks(range(count))
        axis.set_yticks(range(count))
        for at, row in enumerate(rows):
            for to, value in enumerate(row):
                ink = "white" if fractions[at][to] > 0.5 else "#222222"
                axis.text(to, at, f"{value:.4g}", ha="center", va="center", fontsize=8, color=ink)
    axis.set_xlabel("output")
    axis.set_ylabel("target")
    axis.set_title(title, fontsize=11, loc="left", parse_math=False)
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    return as_png(figure)
