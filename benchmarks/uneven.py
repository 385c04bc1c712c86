"""Where an asynchronous parameter server pays: ``python -m benchmarks.uneven``.

Two workers, the second one three times as slow as it is, or both alike; the model is that of the page
docs/parameter-server.md, whose table this prints. Rounds are interleaved, for other programs may use the machine, too.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.samples import DATA, ROOT, mnist_root

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
    "model._target_=uneven.Uneven",
    "model.hidden_features=[128,128]",
    "data.batch_size=2048",
    "optimizer.lr=0.1",
    "logger=none",
    "trainer.progress=false",
    "launcher.device=cpu",
)


def run(folder: Path, slowness: int, epochs: int, *strategy: str) -> tuple[float, float]:
    """Return samples a second and the accuracy on the test images."""
    overrides = [*RECIPE, *strategy, f"data.root={mnist_root()}", f"+model.slowness={slowness}"]
    command = [sys.executable, "-m", "ddp_recipes", *overrides, f"trainer.max_epochs={epochs}", "hydra.run.dir=run"]
    subprocess.run([*command, "checkpoint=none"], cwd=folder, check=True, stdout=subprocess.DEVNULL, timeout=600)
    summary = json.loads((folder / "run" / "summary.json").read_text())
    return summary["samples_per_second"], summary["metrics"]["val/accuracy"]


def main() -> None:
    """Play the rounds, and print a table with medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=12)
    arguments = parser.parse_args()
    page = (ROOT / "docs" / "parameter-server.md").read_text(encoding="utf-8")
    module = re.search(r"^```python\n# uneven\.py\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert module is not None
    results: dict[tuple[str, int], list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as made_up:
        os.environ.setdefault(DATA, made_up)
        for _ in range(arguments.rounds):
            for slowness in (3, 1):
                for name, overrides in STRATEGIES.items():
                    with tempfile.TemporaryDirectory() as folder:
                        (Path(folder) / "uneven.py").write_text(module[1])
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
