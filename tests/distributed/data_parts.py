"""Data sets and tasks that a user might bring, found by their dotted names."""

from pathlib import Path
from typing import Any

from ddp_recipes import Task


class Announced(Task):
    """Writes down which data set is evaluated next."""

    def __init__(self, folder: str, **parts: Any) -> None:
        super().__init__(**parts)
        self.folder = Path(folder)

    def start_evaluation(self, split: str, number: int) -> None:
        with (self.folder / "announced").open("a") as file:
            file.write(f"{split} {number}, ")
