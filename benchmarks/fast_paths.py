"""What each path of ``runtime/fast_paths.py`` is good for: it is switched off alone, the others stay on, on one CPU.

``python -m benchmarks.fast_paths`` prints medians of interleaved rounds. They are times of the processor, not of the
clock, so that other work on the machine counts less. Exit status 1 where one brings less than 1 %.
"""

import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from benchmarks.samples import ROOT
from ddp_recipes.callbacks import Callback
from ddp_recipes.runtime import fast_paths
from ddp_recipes.runtime.phases import CALLS

ON = "all on"
STEPS = 100  # of a turn
ROUNDS = 40
STARTS = 7
GOAL = 0.01
QUIET = ["data.val=null", "checkpoint.enabled=false", "logger=none", "trainer.progress=false", "launcher.device=cpu"]
TOY = ["model=toy", "data=random", f"trainer.max_steps={4 * STEPS * (ROUNDS + 1)}", "trainer.max_epochs=null"]
IMAGES = [
    "model=resnet18",
    "data=fake_images",
    "data.num_samples=256",
    "trainer.max_steps=8",
    "trainer.max_epochs=null",
]
START = """
import resource, torch
from ddp_recipes.runtime import fast_paths
fast_paths.enable({on})
weight = torch.nn.Parameter(torch.ones(3))
optimizer = fast_paths.uncompiled(torch.optim.SGD)([weight], lr=0.1)
weight.sum().backward()
optimizer.step()
usage = resource.getrusage(resource.RUSAGE_SELF)
print(usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)
"""


class Turns(Callback):
    """Switches a path off for some steps, then the next one; writes the milliseconds of a step in each turn."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.turns: dict[str, list[float]] = {}

    def on_start(self, directory: Path | None, task: torch.nn.Module) -> None:
        """Find what is to be switched."""
        self.ways = ways(next(each for each in gc.get_objects() if isinstance(each, Optimizer)))
        self.switch(ON)

    def switch(self, name: str) -> None:
        """Begin a turn without the path of this name."""
        self.name = name
        for way, (owner, attribute, fast, plain) in self.ways.items():
            setattr(owner, attribute, plain if way == name else fast)
        self.began = time.process_time()

    def on_step(self, step: int) -> None:
        """End a turn."""
        if step % STEPS == 0:
            took = time.process_time() - self.began
            self.turns.setdefault(self.name, []).append(1e3 * took / STEPS)
            names = [ON, *self.ways]
            self.switch(names[(names.index(self.name) + 1) % len(names)])

    def on_end(self) -> None:
        """Write; the first round warms up."""
        self.path.write_text(json.dumps({name: turns[1:] for name, turns in self.turns.items()}))


class Steps(Callback):
    """Writes the milliseconds of each step but the first."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.ends: list[float] = []

    def on_step(self, step: int) -> None:
        """Note when a step ends."""
        self.ends.append(time.process_time())

    def on_end(self) -> None:
        """Write."""
        self.path.write_text(json.dumps([1e3 * (end - begin) for begin, end in itertools.pairwise(self.ends)]))


def ways(optimizer: Optimizer) -> Mapping[str, tuple[Any, str, Any, Any]]:
    """Return by name where a path is called in a run, and what is called there: the fast one, and torch's own."""
    torchs: Callable[..., Any] = Optimizer.profile_hook_step(torch.optim.SGD.step)

    def step() -> None:  # as the scheduler wraps it
        optimizer._opt_called = True  # type: ignore[attr-defined]
        torchs(optimizer)

    return {
        "backward": (CALLS, "backward", fast_paths.backward, lambda loss: loss.backward()),
        "zero_grad": (CALLS, "zero_grad", fast_paths.zero_grad, lambda each: each.zero_grad()),
        "uncompiled": (optimizer, "step", optimizer.step, step),
        "fused_step": (fast_paths, "fused_step", fast_paths.fused_step, lambda _: False),
    }


def run(callback: type[Callback], overrides: Sequence[str], environ: Mapping[str, str] | None = None) -> Any:
    """Return what a callback writes in a run of one process."""
    with tempfile.TemporaryDirectory(prefix="ddp_recipes_fast_paths_") as folder:
        noted = Path(folder, "noted")
        callbacks = f"+callbacks.bench={{_target_: benchmarks.fast_paths.{callback.__name__}, path: {noted}}}"
        command = [sys.executable, str(ROOT / "train.py"), *overrides, *QUIET, callbacks, "launcher.nproc_per_node=1"]
        env = {**os.environ, "OMP_NUM_THREADS": "1", **(environ or {})}
        subprocess.run([*command, f"hydra.run.dir={folder}/run"], env=env, check=True, stdout=subprocess.DEVNULL)
        return json.loads(noted.read_text())


def toy_steps() -> dict[str, list[float]]:
    """Return by path what a toy step takes longer without it, as shares of the step, a figure a round."""
    turns = run(Turns, TOY)
    print(f"toy step: {1e3 * statistics.median(turns[ON]):.1f} µs")
    rounds = range(min(map(len, turns.values())))
    return {f"{name}, toy step": [turns[name][at] / turns[ON][at] - 1 for at in rounds] for name in turns if name != ON}


def starts() -> dict[str, list[float]]:
    """Return what a start takes longer, and more memory, with torch's own optimizer."""
    found: dict[str, list[float]] = {"uncompiled, start": [], "uncompiled, memory of a rank": []}
    for _ in range(STARTS):
        both = [_numbers(subprocess.check_output([sys.executable, "-c", START.format(on=on)])) for on in (True, False)]
        for name, fast, plain in zip(found, *both, strict=True):
            found[name].append(plain / fast - 1)
    return found


def _numbers(text: bytes) -> list[float]:
    return [float(word) for word in text.split()]


def image_steps() -> dict[str, list[float]]:
    """Return what a step of a convolutional network takes longer where glibc gives freed memory back.

    An empty ``GLIBC_TUNABLES`` sets nothing up, and leaves glibc as it is.
    """
    shares = []
    for _ in range(STARTS):
        fast, plain = (statistics.median(run(Steps, IMAGES, environ)) for environ in ({}, {"GLIBC_TUNABLES": ""}))
        shares.append(plain / fast - 1)
    return {"keep_freed_memory, step of resnet18": shares}


if __name__ == "__main__":
    measures: Sequence[Callable[[], dict[str, list[float]]]] = (toy_steps, starts, image_steps)
    useless = []
    for measure in measures:
        for title, shares in measure().items():
            low, middle, high = statistics.quantiles(shares, n=4)
            print(f"without {title}: {middle:+.1%} (middle half {low:+.1%} to {high:+.1%})", flush=True)
            if middle < GOAL:
                useless.append(title)
    raise SystemExit(f"less than {GOAL:.0%}: {', '.join(useless)}" if useless else 0)
