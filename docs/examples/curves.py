"""Draws the validation curves of runs with ``logger=csv``: python curves.py PICTURE METRIC RUN_DIRECTORY..."""

import csv
import sys
from pathlib import Path

from matplotlib.figure import Figure


def curve(run: str, metric: str) -> tuple[list[int], list[float]]:
    """Return the steps and values of a metric of a run."""
    with (Path(run) / "csv" / "metrics.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get(metric)]
    return [int(row["step"]) for row in rows], [float(row[metric]) for row in rows]


if __name__ == "__main__":
    picture, metric, *runs = sys.argv[1:]
    figure = Figure(figsize=(6, 3), layout="constrained")
    axes = figure.subplots()
    for run in runs:
        axes.plot(*curve(run, metric), marker="o", markersize=3, label=Path(run).name)
    axes.set(xlabel="step", ylabel=metric)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=100)
