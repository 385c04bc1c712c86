"""Write ``flowers.csv``: Fisher's irises as scikit-learn ships them, rows in a random but fixed order."""

import csv
import random
from pathlib import Path

from sklearn.datasets import load_iris

COLUMNS = ["sepal_length", "sepal_width", "petal_length", "petal_width"]


def main() -> None:
    """Write the table beside this file."""
    flowers = load_iris()
    rows = [
        [*map(float, row), flowers.target_names[kind]] for row, kind in zip(flowers.data, flowers.target, strict=True)
    ]
    random.Random(0).shuffle(rows)
    with (Path(__file__).parent / "flowers.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*COLUMNS, "species"])
        writer.writerows(rows)


if __name__ == "__main__":
    main()
