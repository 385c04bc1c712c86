"""What ``ddp_exact`` costs against plain accumulation of the same micro-batches: ``python -m benchmarks.exact``."""

import argparse
import os
import tempfile
from dataclasses import replace

from benchmarks.competitors import ours
from benchmarks.player import Seat
from benchmarks.results import Group, Row, Settings, in_ranks, raw_turns, table
from benchmarks.samples import DATA
from benchmarks.steps import ratio, step_time
from benchmarks.turns import Entry, Session, session

GOAL = 1.3
SHARDS = 12
STEPS = {"toy": 50, "mnist": 10, "resnet18": 1}  # of a turn; each step has a micro-batch for each shard
QUIET = ("checkpoint=none", "logger=none", "trainer.progress=false")


def measure(settings: Settings) -> Group:
    """Measure a step of each workload at each number of ranks."""
    rows: list[Row] = []
    raw = {}
    for workload, steps in STEPS.items():
        for ranks in settings.ranks:
            sessions = [run(workload, steps, ranks, settings) for _ in range(settings.sessions)]
            title = f"{workload} step of {SHARDS} micro-batches, {in_ranks(ranks)}"
            rows.append(Row(title, "ddp_exact / accumulation", ratio(sessions, "ddp_exact", "accumulation"), GOAL))
            rows += [Row(title, name, step_time(sessions, name), unit="µs") for name in sessions[0]]
            raw[title] = raw_turns(sessions)
    return Group(rows, raw)


def run(workload: str, steps: int, ranks: int, settings: Settings) -> Session:
    """Let both train in turns: the same number of equal micro-batches on each rank, and the same optimizer steps."""
    seat = Seat("", workload=workload, ranks=ranks, device=settings.device)
    accumulate = f"trainer.accumulate_grad_batches={SHARDS // ranks}"
    exact = ("strategy=ddp_exact", f"strategy.shards={SHARDS}")
    entries = [
        Entry(replace(seat, name="accumulation"), ours.with_overrides(*QUIET, "strategy=ddp", accumulate), joins=False),
        Entry(replace(seat, name="ddp_exact"), ours.with_overrides(*QUIET, *exact), joins=False),
    ]
    return session(entries, steps, 5 if settings.quick else 15, warm_up=steps)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="1,2", help="numbers of ranks (default: %(default)s)")
    parser.add_argument(
        "--sessions", type=int, default=1, help="times that all is started afresh (default: %(default)s)"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ddp_recipes_bench_data_") as data:
        os.environ[DATA] = data
        ranks = tuple(map(int, options.ranks.split(",")))
        print(table(measure(Settings(options.quick, ranks, options.sessions, options.device)).rows))
