"""What ``strategy=fsdp`` costs a step, beside ``fully_shard`` by hand and what peers have: ``python -m benchmarks.sharding``.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from benchmarks.competitor import Failed
from benchmarks.competitors import ours
from benchmarks.player import Seat
from benchmarks.results import Group, Row, Settings, in_ranks, raw_turns, table, write
from benchmarks.samples import ROOT
from benchmarks.steps import ratio, step_time
from benchmarks.turns import Entry, Session, module, session
from benchmarks.workloads import get

HAND, ACCUMULATED = "by hand", "by hand, accumulated"
OURS, EXACT, HALVES = "ours", "ours, exact", "ours, exact, 2 shards a rank"
LIGHTNING, ACCELERATE = "lightning", "accelerate"
# Ours against another, and what it may take of the other's time.
GOALS = {
    (OURS, HAND): 1.03,
    (EXACT, HAND): 1.3,
    (HALVES, ACCUMULATED): 1.3,
    (OURS, LIGHTNING): 1.0,
    (OURS, ACCELERATE): 1.0,
}
STEPS = {"gpt_1m": {2: 10, 4: 5}, "gpt_10m": {2: 2, 4: 1}}  # of a turn, by number of ranks
ROUNDS = 9
SAME = 1e-3  # losses after a turn may differ by


def speed(settings: Settings) -> Group:
    """Measure a step of each size at each number of ranks."""
    rows: list[Row] = []
    raw = {}
    for workload, steps in STEPS.items():
        for ranks in settings.ranks:
            title = f"{workload}, {in_ranks(ranks)}"
            turns = session(entries(workload, ranks, settings), steps[ranks], 3 if settings.quick else ROUNDS, warm_up=3)
            check_losses(title, turns)
            rows += [
                Row(title, f"{name} / {other}", ratio([turns], name, other), goal)
                for (name, other), goal in GOALS.items()
                if other in turns
            ]
            rows += [Row(title, name, step_time([turns], name), unit="µs") for name in turns]
            raw[title] = raw_turns([turns])
    return Group(rows, raw)


def check_losses(title: str, turns: Session) -> None:
    """See that all take the same batches, and learn the same from them.

    Raises:
        Failed: one does not.
    """
    for name, each in turns.items():
        for turn, hand in zip(each, turns[HAND], strict=True):
            assert turn.level is not None
            assert hand.level is not None
            if abs(turn.level / hand.level - 1) > SAME:
                curves = {name: [turn.level for turn in each] for name, each in turns.items()}
                raise Failed(f"{title}: {name} does not give the numbers of {HAND}. Losses after each turn: {curves}")
    print(f"{title}: {', '.join(turns)} agree on the losses {[turn.level for turn in turns[HAND]]}", flush=True)


def entries(workload: str, ranks: int, settings: Settings) -> list[Entry]:
    """Return who takes part."""
    seat = Seat("", workload=workload, ranks=ranks, device=settings.device, shuffle=False)
    quiet = ("checkpoint=none", "logger=none", "trainer.progress=false", "strategy=fsdp")
    half = f"data.batch_size={get(workload).batch_size // 2}"
    found = [
        Entry(replace(seat, name=HAND), module("sharded")),
        Entry(replace(seat, name=OURS), ours.with_overrides(*quiet), joins=False),
        Entry(replace(seat, name=EXACT), ours.with_overrides(*quiet, f"strategy.shards={ranks}"), joins=False),
        Entry(replace(seat, name=ACCUMULATED, option="accumulate"), module("sharded")),
        Entry(replace(seat, name=HALVES), ours.with_overrides(*quiet, f"strategy.shards={2 * ranks}", half), joins=False),
    ]
    if settings.peers and find_spec("lightning"):
        found.append(Entry(replace(seat, name=LIGHTNING, option="model_parallel"), module("lightning_")))
    if settings.peers and find_spec("accelerate"):
        found.append(Entry(replace(seat, name=ACCELERATE), module("accelerate_")))
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, without the peers")
    options = parser.parse_args()
    settings = Settings(options.quick, tuple(map(int, options.ranks.split(","))), 1, "cpu", peers=not options.quick)
    print(table(speed(settings).rows))
