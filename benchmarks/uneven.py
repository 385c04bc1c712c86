"""Where an asynchronous parameter server pays: ``python -m benchmarks.uneven``.

Two workers, the second one three times as slow as it is, or both alike: this prints the table of
docs/parameter-server.md. Rounds are interleaved, for other programs may use the machine, too.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from benchmarks.samples import DATA, mnist_root, python_path
from ddp_recipes.models import MLP

STRATEGIES = {
    "ddp": ("strategy=ddp", "launcher.nproc_per_node=2"),
    "parameter_server": ("strategy=parameter_server", "launcher.nproc_per_node=3"),
    "parameter_server, staleness 4": (
        "strategy=parameter_server",
        "strategy.staleness=4",
        "launcher.nproc_per_node=3",
    ),
}
RECIPE = (
    "data=mnist",
    "model=mlp",
    "model._target_=benchmarks.uneven.Uneven",
    "model.hidden_features=[128,128]",
    "data.batch_size=2048",
    "optimizer.lr=0.1",
    "logger=none",
    "trainer.progress=false",
    "launcher.device=cpu",
)


class Uneven(MLP):
    """An MLP whose forward and backward take so many times as long on the last rank: it sleeps for the difference."""

    def __init__(self, slowness: float, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.slowness = slowness
        self.begun: float | None = None
        first = next(self.parameters())  # its gradient comes last
        first.register_post_accumulate_grad_hook(lambda _: self.rest())  # type: ignore[no-untyped-call]

    def forward(self, input: Tensor) -> Tensor:
        self.begun = time.thread_time()
        return super().forward(input)

    def rest(self) -> None:
        if self.begun is not None and dist.get_rank() == dist.get_world_size() - 1:
            time.sleep((self.slowness - 1) * (time.thread_time() - self.begun))
        self.begun = None


def run(folder: Path, slowness: int, epochs: int, *strategy: str) -> tuple[float, float]:
    """Return samples a second and the accuracy on the test images."""
    overrides = [*RECIPE, *strategy, f"data.root={mnist_root()}", f"+model.slowness={slowness}"]
    command = [sys.executable, "-m", "ddp_recipes", *overrides, f"trainer.max_epochs={epochs}", "hydra.run.dir=run"]
    environ = os.environ | {"PYTHONPATH": python_path()}
    subprocess.run(
        [*command, "checkpoint=none"], cwd=folder, env=environ, check=True, stdout=subprocess.DEVNULL, timeout=600
    )
    summary = json.loads((folder / "run" / "summary.json").read_text())
    return summary["samples_per_second"], summary["metrics"]["val/accuracy"]


def main() -> None:
    """Play the rounds, and print a table with medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=12)
    arguments = parser.parse_args()
    results: dict[tuple[str, int], list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as made_up:
        os.environ.setdefault(DATA, made_up)
        for _ in range(arguments.rounds):
            for slowness in (3, 1):
                for name, overrides in STRATEGIES.items():
                    with tempfile.TemporaryDirectory() as folder:
                        found = run(Path(folder), slowness, arguments.epochs, *overrides)
                    results.setdefault((name, slowness), []).append(found)
    print(f"{'':32}{'one 3 x slower':>26}{'both alike':>26}")
    for name in STRATEGIES:
        cells = []
        for slowness in (3, 1):
            rates, accuracies = zip(*results[name, slowness], strict=True)
            rate, accuracy = statistics.median(rates), statistics.median(accuracies)
            cells.append(f"{rate:12,.0f}/s, {accuracy:.3f}")
        print(f"{name:32}" + "".join(f"{cell:>26}" for cell in cells))


if __name__ == "__main__":
    main()
