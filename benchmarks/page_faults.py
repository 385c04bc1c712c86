"""Memory that one step frees serves the next, on the CPU: ``python -m benchmarks.page_faults``.

Prints how many pages of memory a step takes anew from the system, as this package sets glibc's allocator up and as
glibc is by itself. Exit status 1 where the first is 100 pages or more, about what is no layer's output.
"""

import itertools
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.samples import ROOT
from ddp_recipes.callbacks import Callback

GOAL = 100
# Outputs of 8 MB a layer.
RUN = ["data=random", "data.num_samples=16384", "data.batch_size=4096", "model=mlp", "model.hidden_features=[512,512]"]
QUIET = ["data.val=null", "trainer.max_epochs=8", "checkpoint.enabled=false", "logger=none", "launcher.device=cpu"]


class PageFaults(Callback):
    """Writes down how many pages of memory a step takes anew from the system: the median of the last 20."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.counts = [self._so_far()]

    @staticmethod
    def _so_far() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    def on_step(self, step: int) -> None:
        """Count."""
        self.counts.append(self._so_far())

    def on_end(self) -> None:
        """Write."""
        last = self.counts[-21:]
        self.path.write_text(str(statistics.median(after - before for before, after in itertools.pairwise(last))))


def measure(environ: dict[str, str]) -> float:
    """Return the pages that a step takes anew, in a run that has these environment variables.

    glibc reads them where a program starts, so it is a program of its own.
    """
    with tempfile.TemporaryDirectory(prefix="ddp_recipes_page_faults_") as folder:
        noted = Path(folder, "page_faults")
        faults = f"+callbacks.faults={{_target_: benchmarks.page_faults.PageFaults, path: {noted}}}"
        command = [sys.executable, str(ROOT / "train.py"), *RUN, *QUIET, faults, "launcher.nproc_per_node=1"]
        env = {**os.environ, **environ}
        subprocess.run([*command, f"hydra.run.dir={folder}/run"], env=env, check=True, stdout=subprocess.DEVNULL)
        return float(noted.read_text())


if __name__ == "__main__":
    kept, given_back = measure({}), measure({"MALLOC_TRIM_THRESHOLD_": "131072"})  # glibc's own threshold
    print(f"pages a step takes anew: {kept:g} (goal: fewer than {GOAL}); as glibc is by itself: {given_back:g}")
    raise SystemExit(kept >= GOAL)
