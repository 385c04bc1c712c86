"""When the processes of a pipeline work, and on what."""

from pathlib import Path

from ddp_recipes.config.parallelism import StrategySettings
from ddp_recipes.loggers import Logger
from ddp_recipes.model_parallel.timeline import BACKWARD, FORWARD, Cell, bubble, cells_of
from ddp_recipes.reporting.figures import as_png, leave_picture

COLORS = {FORWARD: ("#7fa8d1", "#a9c4de", "#5b8bbd", "#c7d9ea"), BACKWARD: ("#c44e52", "#d98a8c", "#a83a3e", "#e6b3b4")}
READABLE = 60  # units of time: in more, numbers of micro-batches cannot be read


def leave_schedule(directory: Path, logger: Logger, settings: StrategySettings) -> None:
    """Leave ``schedule.png``."""
    pipeline = settings.pipeline
    assert pipeline is not None
    title = f"{pipeline.schedule}, {pipeline.micro_batches} micro-batches"
    leave_picture(directory, logger, "schedule", lambda: draw_schedule(cells_of(pipeline), title))


def draw_schedule(cells: list[list[Cell]], title: str) -> bytes:
    """Return a PNG with a lane for each process, and in it a cell for each forward and backward of a micro-batch."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    span = max(lane[-1].end for lane in cells)
    processes = len(cells)
    stages = 1 + max(cell.work.stage for lane in cells for cell in lane)
    figure = Figure(figsize=(11, 1.5 + 0.55 * processes), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.add_subplot()
    for process, lane in enumerate(cells):
        axis.barh(process, span, height=0.8, color="#f1f1f1", zorder=0)
        for cell in lane:
            shades = COLORS[cell.work.kind]
            color = shades[cell.work.stage // processes % len(shades)]
            axis.barh(process, cell.end - cell.start, 0.8, cell.start, color=color, edgecolor="white", linewidth=1.2)
            if span <= READABLE:
                middle, light = (cell.start + cell.end) / 2, cell.work.stage // processes % 2
                ink = "white" if cell.work.kind == BACKWARD and not light else "#222222"
                axis.text(middle, process, str(cell.work.micro_batch), ha="center", va="center", fontsize=9, color=ink)
    names = [", ".join(map(str, range(process, stages, processes))) for process in range(processes)]
    plural = "s" if stages > processes else ""
    axis.set_yticks(
        range(processes), [f"process {process}\nstage{plural} {name}" for process, name in enumerate(names)]
    )
    axis.set_ylim(processes - 0.5, -0.5)
    axis.set_xlim(0, span)
    axis.set_xlabel("time, in forward passes of a micro-batch through one stage; a backward pass takes two")
    axis.set_title(f"{title}: processes wait {bubble(cells):.0%} of the time", fontsize=11, loc="left")
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    rounds = range(min(-(-stages // processes), len(COLORS[FORWARD])))
    which = [
        f", stages {each * processes} to {(each + 1) * processes - 1}" if len(rounds) > 1 else "" for each in rounds
    ]
    patches = [
        Patch(color=COLORS[kind][each], label=f"{name}{which[each]}")
        for kind, name in ((FORWARD, "forward"), (BACKWARD, "backward"))
        for each in rounds
    ]
    patches.append(Patch(color="#f1f1f1", label="waiting"))
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False, fontsize=9)
    return as_png(figure, 120)
