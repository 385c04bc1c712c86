"""A picture of a split: which block is on which device, and what of a step's time and memory is its own."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddp_recipes.config.parallelism import Block, Stage
from ddp_recipes.loggers import Logger
from ddp_recipes.reporting.figures import as_png, leave_picture

log = logging.getLogger(__name__)

ROWS = 48  # about as many blocks as can be read; neighbours share a row where there are more
COLORS = ("#3b6ea8", "#c97b2f", "#4d8f57", "#9a5ba5")  # stages take them in turn


def leave_split(directory: Path, logger: Logger, name: str, stages: Sequence[Stage]) -> None:
    """Leave ``split.png``, or say why there is none."""
    if stages[0].time is None:
        log.info("There is no split.png: what blocks cost is known from trying the split out, which failed.")
        return
    caption = f"{name} over {len(stages)} devices: each replica's blocks and what they take"
    leave_picture(directory, logger, "split", lambda: draw_split(stages, caption))


def draw_split(stages: Sequence[Stage], caption: str) -> bytes:
    """Return the picture as a PNG; the stages must have times."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    blocks = [merged(stage.blocks, max(1, ROWS // len(stages))) for stage in stages]
    height = 1.5 + 0.2 * sum(map(len, blocks)) + 0.12 * len(stages)
    figure = Figure(figsize=(10, height), layout=ConstrainedLayoutEngine(h_pad=0.08))
    figure.suptitle(caption, fontsize=11, x=0.01, ha="left")
    panels = figure.subplots(1, 2, sharey=True)
    for panel, title in zip(
        panels, ("time, % of a step", "memory, MB: weights, gradients, optimizer, activations"), strict=True
    ):
        panel.set_title(title, fontsize=9, loc="left")
        panel.tick_params(labelsize=8, length=0)
        panel.spines[["top", "right", "bottom"]].set_visible(False)
        panel.xaxis.set_visible(False)
    _draw(panels, stages, blocks)
    return as_png(figure)


def _draw(panels: Any, stages: Sequence[Stage], blocks: Sequence[Sequence[Block]]) -> None:
    """Draw a bar for each block, from the top down, and what each stage comes to beside its own."""
    row, names, places = 0.0, [], []
    largest = [max(value) for value in zip(*(_numbers(block) for each in blocks for block in each), strict=True)]
    for number, (stage, own) in enumerate(zip(stages, blocks, strict=True)):
        rows = [row + at for at in range(len(own))]
        names += [block.name for block in own]
        places += rows
        assert stage.time is not None
        color = COLORS[number % len(COLORS)]
        totals = (f"{stage.time:.0%}", f"{_short(sum(block.memory for block in own) / 1e6)} MB")
        for panel, values, most, total in zip(
            panels, zip(*map(_numbers, own), strict=True), largest, totals, strict=True
        ):
            bars = panel.barh(rows, values, height=0.72, color=color)
            panel.bar_label(bars, [_short(value) for value in values], padding=3, fontsize=7, color="#333333")
            panel.axhspan(rows[0] - 0.6, rows[-1] + 0.6, color="#000000", alpha=0.04 * (number % 2), lw=0)
            where, text = (1.34 * most, (rows[0] + rows[-1]) / 2), f"device {number}\n{total}"
            panel.text(*where, text, fontsize=9, ha="right", va="center", color=color)
            panel.set_xlim(0, 1.36 * most or 1)  # of nothing there is still an axis
        row = rows[-1] + 1.6
    panels[0].set_yticks(places, names)
    panels[0].set_ylim(places[-1] + 0.8, -0.8)
    panels[1].tick_params(labelleft=False)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _numbers(block: Block) -> tuple[float, float]:
    return 100 * block.time, block.memory / 1e6


def merged(blocks: Sequence[Block], rows: int) -> list[Block]:
    """Return at most so many blocks: neighbours become one, named after the first and the last of them."""
    each = -(-len(blocks) // rows)
    groups = [blocks[first : first + each] for first in range(0, len(blocks), each)]
    return [
        Block(
            group[0].name if len(group) == 1 else f"{group[0].name} … {group[-1].name}",
            sum(block.time for block in group),
            sum(block.memory for block in group),
        )
        for group in groups
    ]
