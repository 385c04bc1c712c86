"""Points of a run whose ranks may be replaced: each once."""

import csv
from pathlib import Path

from ddp_recipes.loggers import CSVLogger
from ddp_recipes.recovery.state_transfer import Points


def column(directory: Path, name: str) -> list[tuple[int, float]]:
    with (directory / "metrics.csv").open(newline="") as file:
        return [(int(row["step"]), float(row[name])) for row in csv.DictReader(file) if row[name]]


def test_where_ranks_are_replaced_points_of_batches_hide_none_of_steps(tmp_path: Path) -> None:
    logger = Points(CSVLogger(tmp_path))
    logger.scalars({"loss": 1.0}, 1)
    for batch in (0, 1, 2, 1, 2):  # a validation that a loss cut off is done again
        logger.of_batch({"val": float(batch)}, batch, 1)
    logger.scalars({"loss": 2.0}, 2)
    logger.close()
    assert column(tmp_path, "loss") == [(1, 1.0), (2, 2.0)]
    assert column(tmp_path, "val") == [(0, 0.0), (1, 1.0), (2, 2.0)]
