"""Two stages in two processes against one process, a thread in each: ``python -m benchmarks.pipeline``.

The model is a chain of equal convolutions, so its halves take equally long, and it computes long enough for messages
not to count. The aim is 1.6 times the speed, a step in 0.625 of the time. With 16 micro-batches a pipeline of two
waits a 17th of the time, so more than 1.88 cannot be.
"""

import argparse
import sys
from collections.abc import Callable

from torch import Tensor, nn

from benchmarks.player import Seat
from benchmarks.results import Group, Row, Settings, raw_turns, table
from benchmarks.samples import ROOT
from benchmarks.steps import ratio, step_time
from benchmarks.turns import Entry, Session, session

GOAL = 1 / 1.6
BLOCKS, CHANNELS, SIDE = 8, 32, 32
BATCH, MICRO_BATCHES = 64, 16


class Tower(nn.Sequential):
    """Equal blocks of a convolution and a tanh on images given as vectors; the mean of each channel comes out."""

    def __init__(self, in_features: int, out_features: int) -> None:
        assert (in_features, out_features) == (CHANNELS * SIDE * SIDE, CHANNELS)
        blocks = [nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.Tanh()) for _ in range(BLOCKS)]
        super().__init__(nn.Unflatten(1, (CHANNELS, SIDE, SIDE)), *blocks)

    def forward(self, input: Tensor) -> Tensor:
        for block in self:
            input = block(input)
        return input.mean(dim=(2, 3))


def command(*overrides: str) -> Callable[[Seat], list[str]]:
    """Return what makes the command line of a competitor."""
    return lambda seat: [
        sys.executable,
        str(ROOT / "train.py"),
        "model=linear",
        "model._target_=benchmarks.pipeline.Tower",
        "data=random",
        f"data.num_samples={4 * BATCH}",
        f"data.in_features={CHANNELS * SIDE * SIDE}",
        f"data.out_features={CHANNELS}",
        f"data.batch_size={BATCH}",
        "data.val=null",
        "launcher.device=cpu",
        f"launcher.nproc_per_node={seat.ranks}",
        "trainer.max_epochs=null",
        f"trainer.max_steps={10**9}",  # until the callback says so
        "trainer.progress=false",
        "logger=none",
        "checkpoint=none",
        f"hydra.run.dir={seat.directory}/run",
        "+callbacks.turns._target_=benchmarks.competitors.ours.TakeTurns",
        *overrides,
    ]


def measure(settings: Settings) -> Group:
    """Measure a step of each schedule."""
    sessions = [run(settings) for _ in range(settings.sessions)]
    title = f"step of {BATCH} samples"
    names = [name for name in sessions[0] if name != "one process"]
    rows = [Row(title, f"{name} / one process", ratio(sessions, name, "one process"), GOAL) for name in names]
    rows += [Row(title, name, step_time(sessions, name), unit="µs") for name in sessions[0]]
    return Group(rows, {title: raw_turns(sessions)})


def run(settings: Settings) -> Session:
    """Let all train in turns."""
    half = f"model.split=[{1 + BLOCKS // 2}]"
    staged = ("strategy=ddp_pipeline", half, f"strategy.micro_batches={MICRO_BATCHES}")

    def entry(name: str, ranks: int, *overrides: str) -> Entry:
        return Entry(Seat(name, option="bare", ranks=ranks), command(*overrides), joins=False)

    entries = [
        entry("one process", 1, "strategy=single"),
        entry("1f1b", 2, *staged),
        entry("gpipe", 2, *staged, "strategy.schedule=gpipe"),
    ]
    return session(entries, 1, 3 if settings.quick else 10, warm_up=1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--sessions", type=int, default=1, help="times that all is started afresh (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    options = parser.parse_args()
    print(table(measure(Settings(options.quick, (1, 2), options.sessions, "cpu")).rows))
