"""What ``strategy=fsdp`` costs, beside ``fully_shard`` by hand and what peers have: ``python -m benchmarks.sharding``.

Measures steps, the memory of a rank (``sharded_memory.py``) and checkpoints (``sharded_checkpoints.py``). Leaves
``results/sharding.json``, with every turn, ``.md``, to be read, and ``.png``.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks import sharded_checkpoints, sharded_memory
from benchmarks.competitor import Failed
from benchmarks.competitors import ours
from benchmarks.figures import draw_rows
from benchmarks.hashes import quiet
from benchmarks.player import Seat
from benchmarks.results import Group, Row, Settings, in_ranks, page, raw_turns, table, write
from benchmarks.samples import ROOT
from benchmarks.steps import ratio, step_time
from benchmarks.turns import Entry, Session, module, session
from benchmarks.workloads import get

HAND, ACCUMULATED = "by hand", "by hand, accumulated"
OURS, EXACT, HALVES = "ours", "ours, exact", "ours, exact, 2 shards a rank"
LIGHTNING, ACCELERATE = "lightning", "accelerate, DDP"
# Ours against another, and what it may take of the other's time; with DDP each rank holds all.
GOALS = {
    (OURS, HAND): 1.03,
    (EXACT, HAND): 1.3,
    (HALVES, ACCUMULATED): 1.3,
    (OURS, LIGHTNING): 1.0,
    (OURS, ACCELERATE): None,
}
STEPS = {"gpt_1m": {2: 10, 4: 5}, "gpt_10m": {2: 2, 4: 1}}  # of a turn, by number of ranks
ROUNDS, QUICK_ROUNDS = 7, 3
SAME = 1e-3  # losses after a turn may differ by


def speed(settings: Settings) -> Group:
    """Measure a step of each size at each number of ranks."""
    rows: list[Row] = []
    raw = {}
    for workload, steps in STEPS.items():
        for ranks in settings.ranks:
            title = f"{workload}, {in_ranks(ranks)}"
            turns = session(
                entries(workload, ranks, settings), steps[ranks], 3 if settings.quick else ROUNDS, warm_up=3
            )
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
    own = ("checkpoint=none", "logger=none", "trainer.progress=false", "strategy=fsdp")
    halves = (f"strategy.shards={2 * ranks}", f"data.batch_size={get(workload).batch_size // 2}")
    found = [
        Entry(replace(seat, name=HAND), module("sharded")),
        Entry(replace(seat, name=OURS), ours.with_overrides(*own), joins=False),
        Entry(replace(seat, name=EXACT), ours.with_overrides(*own, f"strategy.shards={ranks}"), joins=False),
        Entry(replace(seat, name=ACCUMULATED, option="accumulate"), module("sharded")),
        Entry(replace(seat, name=HALVES), ours.with_overrides(*own, *halves), joins=False),
    ]
    if settings.peers and find_spec("lightning"):
        found.append(Entry(replace(seat, name=LIGHTNING, option="model_parallel"), module("lightning_")))
    if settings.peers and find_spec("accelerate"):
        found.append(Entry(replace(seat, name=ACCELERATE), module("accelerate_")))
    return found


PARTS: dict[str, Callable[[Settings], Group]] = {
    "speed": speed,
    "memory": sharded_memory.measure,
    "checkpoints": sharded_checkpoints.measure,
}


def main(argv: Sequence[str]) -> int:
    """Measure, print, write; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sharding", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, without the peers; writes nothing")
    parser.add_argument("--only", default=",".join(PARTS), metavar="PARTS", help="some of %(default)s")
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", metavar="FOLDER")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)  # or it could not fork
    settings = Settings(options.quick, tuple(map(int, options.ranks.split(","))), 1, "cpu", peers=not options.quick)
    path = options.out / "sharding.json"
    for name in options.only.split(","):
        began = time.monotonic()
        try:
            group = PARTS[name](settings) if name == "speed" else quietly(PARTS[name], settings)
        except Failed as error:
            print(error, file=sys.stderr)
            return 1
        print(f"\n{name}, {time.monotonic() - began:.0f} s\n{table(group.rows)}", flush=True)
        if not options.quick:
            write(path, name, group, settings)
    if not options.quick:
        show(path)
    return 0


def quietly(measure: Callable[[Settings], Group], settings: Settings) -> Group:
    """Measure without what runs print."""
    with quiet():
        return measure(settings)


def show(path: Path) -> None:
    """Write a results file as tables, and as a picture."""
    results = page(path, "Sharding")
    shown = [row for group in results.values() for row in group["rows"] if row["unit"]]
    there = next(iter(results.values()))["machine"]
    draw_rows(path.with_suffix(".png"), shown, f"{there['processor']}, {there['cores']} cores, torch {there['torch']}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
