"""Pictures of a results file, where matplotlib is installed."""

import json
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

OURS, OTHERS = "#c44e52", "#8c9db5"

Rows = Sequence[Mapping[str, Any]]
"""Rows as the file has them: one panel."""


def draw(path: Path) -> None:
    """Draw a results file into its folder: step times, and what else a run costs."""
    results = json.loads(path.read_text(encoding="utf-8"))
    rows = [row for group in results.values() for row in group["rows"]]
    machine = next(iter(results.values()))["machine"]
    where = f"{machine.get('gpu') or machine['processor']}, {machine['cores']} cores, torch {machine['torch']}"
    ratios = [row for row in rows if row["name"].endswith(" / tutorial")]
    draw_rows(path.with_name(f"{path.stem}-steps.png"), ratios, f"Time against the tutorial's loop (1). {where}")
    titles = ("start to first step", "peak memory", "checkpoint")
    costs = [row for row in rows if row["title"].startswith(titles) and row["unit"] and " - " not in row["name"]]
    draw_rows(path.with_name(f"{path.stem}-costs.png"), costs, f"What else a run costs. {where}")


def draw_rows(path: Path, rows: Rows, caption: str) -> None:
    """Draw a panel of bars for each title; whiskers show the spread."""
    titles = list(dict.fromkeys(row["title"] for row in rows))
    if not titles:
        return
    if find_spec("matplotlib") is None:
        print("matplotlib is not installed, so no figures are drawn; make bench installs it", file=sys.stderr)
        return
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    columns = 2
    lines = -(-len(titles) // columns)
    figure, axes = pyplot.subplots(lines, columns, figsize=(11, 0.6 + 2.2 * lines), squeeze=False, layout="constrained")
    figure.suptitle(caption, fontsize=10)
    for axis, title in zip(axes.flat, titles, strict=False):
        _panel(axis, title, [row for row in rows if row["title"] == title])
    for axis in axes.flat[len(titles) :]:
        axis.set_axis_off()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _panel(axis: Any, title: str, rows: Rows) -> None:
    rows = sorted(rows, key=lambda row: -row["figure"]["median"])
    names = [row["name"].partition(" / ")[0] for row in rows]
    medians = [row["figure"]["median"] for row in rows]
    below = [row["figure"]["median"] - row["figure"]["low"] for row in rows]
    above = [row["figure"]["high"] - row["figure"]["median"] for row in rows]
    colors = [OURS if name.startswith("ours") else OTHERS for name in names]
    bars = axis.barh(names, medians, xerr=[below, above], color=colors, error_kw={"ecolor": "#444444", "lw": 0.8})
    axis.bar_label(
        bars, [f"{median:,.0f}" if median >= 100 else f"{median:.2f}" for median in medians], padding=6, fontsize=8
    )
    if not rows[0]["unit"]:
        axis.axvline(1, color="#444444", lw=0.8, ls=":")
    axis.set_title(f"{title} [{rows[0]['unit']}]" if rows[0]["unit"] else title, fontsize=9, loc="left")
    axis.tick_params(labelsize=8)
    axis.margins(x=0.15)
    axis.spines[["top", "right"]].set_visible(False)
