"""What a killed rank costs, beside what peers have: ``python -m benchmarks.recovery``.

Measures the seconds from a SIGKILL of one rank to the next step that was not done before, what a kill every 20 s takes
of the time, what becomes of the weights, and what a step costs of a run that could replace a rank. Leaves
``results/recovery.json``, ``.md`` and ``.png``.
"""

import argparse
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from omegaconf import OmegaConf

from benchmarks.competitor import Failed
from benchmarks.competitors import ours
from benchmarks.figures import draw_rows
from benchmarks.kills import Kill, kill_at_random, lost_share, train_to_end
from benchmarks.player import Seat
from benchmarks.results import Group, Row, Settings, in_ranks, page, raw_turns, table, write
from benchmarks.samples import ROOT, SEED
from benchmarks.steps import ratio, step_time
from benchmarks.turns import Entry, Spread, module, session

RESTARTED, REPLACED = "ours, all restarted", "ours, replaced"
KEY = "replace_ranks"
NO_KEY = f"launcher.{KEY} is no key of conf/launcher"
KILLS, QUICK_KILLS = 5, 2
ROUNDS, QUICK_ROUNDS = 15, 5
MANY = 1000  # restarts or replacements that a run is granted: a run is killed several times
GOAL_S = 1.5  # of a toy at two ranks
GOAL_OF_PEERS = 1 / 3
EVERY_S, FOR_S, GOAL_LOST = 20.0, 60.0, 10.0  # a kill each, for so long; percent
GOAL_STEP = 1.01
SAVE_EVERY = {"toy": 1000, "resnet18_500mb": 10}  # steps from one checkpoint to the next
DELAY_S = {"toy": (0.5, 3.0), "resnet18_500mb": (1.0, 10.0)}  # from the last recovery to the next kill
TURN_STEPS = {"toy": 250, "resnet18": 5}
STEPS_TO_END, KILL_AFTER = 4000, 1500


def torchrun(seat: Seat) -> list[str]:
    """Return the command that starts Lightning's ranks, and starts all again when one is lost."""
    # Else ranks that are started again may find addresses of those before them (torch 2.15), and fail once more.
    launch = ["env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", sys.executable, "-m", "torch.distributed.run"]
    options = ["--standalone", f"--nproc-per-node={seat.ranks}", f"--max-restarts={MANY}"]
    return [*launch, *options, "-m", "benchmarks.competitors.lightning_restarts"]


def torchft(seat: Seat) -> list[str]:
    """Return the command that starts torchft's replicas and what they need, without the lines that it prints a step."""
    return ["env", "RUST_LOG=error", *module("torchft_")(seat)]


PEERS: dict[str, tuple[str, str, Callable[[Seat], Sequence[str]]]] = {  # package, option, command; some are not quick
    "torchft": ("torchft", "", torchft),
    "torchft, heartbeat of 1 s": ("torchft", "heartbeat", torchft),
    "torchft, survivors wait": ("torchft", "wait", torchft),
    "lightning, torchrun": ("lightning", "", torchrun),
}


@dataclass(frozen=True)
class Plan(Settings):
    """What was asked for.

    Attributes:
        kills: of each run.
    """

    workloads: tuple[str, ...] = tuple(DELAY_S)
    kills: int = KILLS


def entries(workload: str, plan: Plan, ranks: int, **of_seat: Any) -> tuple[list[Entry], dict[str, str]]:
    """Return who takes part, and who does not and why."""
    seat = Seat("", workload=workload, ranks=ranks, save_every=SAVE_EVERY[workload], **of_seat)
    found = [own(replace(seat, name=RESTARTED), f"launcher.max_restarts={MANY}")]
    missing = {}
    if replaces():
        found.append(own(replace(seat, name=REPLACED), f"launcher.{KEY}={MANY}"))
    else:
        missing[REPLACED] = NO_KEY
    for name, (package, option, command) in PEERS.items():
        if find_spec(package) is None:
            missing[name] = f"{package} is not installed"
        elif not (plan.quick and option):
            found.append(Entry(replace(seat, name=name, option=option), command, joins=False))
    return found, missing


def own(seat: Seat, recovers: str) -> Entry:
    """Return this package, with checkpoints, and without what else the peers do not do."""
    overrides = (
        "callbacks.turns._target_=benchmarks.competitors.ours.KeepJournal",
        f"checkpoint.every_n_steps={seat.save_every}",
        "launcher=local",
        "logger=none",
        "trainer.progress=false",
        recovers,
    )
    return Entry(seat, ours.with_overrides(*overrides), joins=False)


@cache
def replaces() -> bool:
    """Return whether the launcher can replace a rank."""
    return KEY in OmegaConf.load(ROOT / "conf" / "launcher" / "auto.yaml")


def kills(plan: Plan) -> Group:
    """Measure the time from a kill to the next step, for each size of state and number of ranks."""
    rows: list[Row] = []
    raw: dict[str, Any] = {}
    for workload in plan.workloads:
        for ranks in plan.ranks:
            title = f"{workload}, {in_ranks(ranks)}"
            taking_part, raw["left out"] = entries(workload, plan, ranks)
            raw[title], survived = {}, {}
            for entry in taking_part:
                name = entry.seat.name
                found, failed = kill_at_random(entry, plan.kills, DELAY_S[workload], SEED)
                raw[title][name] = {"kills": [asdict(each) for each in found], "failed": failed}
                print(f"{title}: {name}: {', '.join(f'{kill.next_s:.2f} s' for kill in found)}", *failed, flush=True)
                if found:
                    survived[name] = found
            rows += rows_of(title, survived)
    return Group(rows, raw)


def rows_of(title: str, survived: Mapping[str, Sequence[Kill]]) -> list[Row]:
    """Return ours against the peers, then everybody's seconds."""
    rows = []
    if REPLACED in survived:
        mine = median(kill.next_s for kill in survived[REPLACED])
        for name, found in survived.items():
            if name != REPLACED:
                against = Spread.of([[mine / kill.next_s for kill in found]])
                rows.append(Row(title, f"{REPLACED} / {name}", against, GOAL_OF_PEERS if name in PEERS else None))
    for name, found in survived.items():
        goal = GOAL_S if (name, title) == (REPLACED, f"toy, {in_ranks(2)}") else None
        rows.append(Row(title, name, Spread.of([[kill.next_s for kill in found]]), goal, unit="s"))
        if any(kill.whole_s > kill.next_s for kill in found):
            whole = Spread.of([[kill.whole_s for kill in found]])
            rows.append(Row(title, f"{name}, until all are back", whole, unit="s"))
    return rows


def effective(plan: Plan) -> Group:
    """Measure what share of the time a kill every 20 s takes, at two ranks."""
    rows: list[Row] = []
    raw: dict[str, Any] = {}
    for workload in plan.workloads:
        title = f"{workload}, {in_ranks(2)}, a kill every {EVERY_S:.0f} s"
        taking_part, raw["left out"] = entries(workload, plan, 2)
        for entry in taking_part:
            name = entry.seat.name
            try:
                lost = Spread.of([[100 * lost_share(entry, FOR_S, EVERY_S, SEED)]])
            except Failed as error:
                raw["left out"][name] = told(error)
                continue
            print(f"{title}: {name}: {lost.median:.1f} % lost", flush=True)
            rows.append(Row(title, f"{name}: time lost", lost, GOAL_LOST if name == REPLACED else None, unit="%"))
    return Group(rows, raw)


def weights(plan: Plan) -> Group:
    """Compare the weights at the end, and the batches that went into them, with those of an undisturbed run."""
    rows: list[Row] = []
    title = f"toy, {in_ranks(2)}, {STEPS_TO_END} steps, a kill after {KILL_AFTER}"
    taking_part, missing = entries("toy", plan, 2, max_steps=STEPS_TO_END)
    for entry in taking_part:
        name = entry.seat.name
        try:
            (undisturbed, _), (disturbed, batches) = (train_to_end(entry, after) for after in (None, KILL_AFTER))
        except Failed as error:
            missing[name] = told(error)
            continue
        apart = max((undisturbed[each] - disturbed[each]).abs().max().item() for each in undisturbed)
        lost = 2 * STEPS_TO_END - batches
        print(f"{title}: {name}: off by {apart:g}, {lost} batches lost", flush=True)
        goal = 0 if name in (RESTARTED, REPLACED) else None
        rows.append(Row(title, f"{name}: a weight is off by", Spread.of([[apart]]), goal))
        rows.append(Row(title, f"{name}: lost", Spread.of([[lost]]), goal, unit="batches"))
    return Group(rows, {"left out": missing})


def told(error: Failed) -> str:
    """Print a failure; return its first line."""
    print(error, file=sys.stderr)
    return str(error).partition("\n")[0].rstrip(".")


def steps(plan: Plan) -> Group:
    """Measure a step of a run that could replace a rank against one that could not, in turns."""
    if not replaces():
        return Group([], {"left out": {REPLACED: NO_KEY}})
    rows: list[Row] = []
    raw: dict[str, Any] = {}
    for workload, count in TURN_STEPS.items():
        for ranks in plan.ranks:
            title = f"{workload} step, {in_ranks(ranks)}"
            seat = Seat("", workload=workload, ranks=ranks)
            quiet = ("launcher=local", "checkpoint=none", "logger=none", "trainer.progress=false")
            both = {f"{KEY}={number}": (*quiet, f"launcher.{KEY}={number}") for number in (1, 0)}
            racing = [
                Entry(replace(seat, name=name), ours.with_overrides(*overrides), joins=False)
                for name, overrides in both.items()
            ]
            turns = session(racing, count, QUICK_ROUNDS if plan.quick else ROUNDS, warm_up=count)
            rows.append(Row(title, " / ".join(both), ratio([turns], *both), GOAL_STEP))
            rows += [Row(title, name, step_time([turns], name), unit="µs") for name in both]
            raw[title] = raw_turns([turns])
    return Group(rows, raw)


PARTS: dict[str, Callable[[Plan], Group]] = {
    "kills": kills,
    "effective": effective,
    "weights": weights,
    "steps": steps,
}
QUICK_PARTS = ("kills", "steps")


def main(argv: Sequence[str]) -> int:
    """Measure, print, write; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recovery", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few kills of the toy at 2 ranks; writes nothing")
    parser.add_argument("--only", metavar="PARTS", help=f"some of {','.join(PARTS)}")
    parser.add_argument("--ranks", default="2,4,8", help="numbers of ranks (default: %(default)s)")
    parser.add_argument("--workloads", default=",".join(DELAY_S), help="what is trained (default: %(default)s)")
    parser.add_argument("--kills", type=int, default=KILLS, help="of each run (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", metavar="FOLDER")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what is measured must not outlive this
    ranks = tuple(map(int, options.ranks.split(",")))
    plan = Plan(options.quick, ranks, 1, workloads=tuple(options.workloads.split(",")), kills=options.kills)
    if options.quick:
        plan = replace(plan, ranks=(2,), workloads=("toy",), kills=QUICK_KILLS)
    path = options.out / "recovery.json"
    for part in options.only.split(",") if options.only else QUICK_PARTS if options.quick else PARTS:
        for name, of_part in split(part, plan):
            began = time.monotonic()
            try:
                group = PARTS[part](of_part)
            except Failed as error:
                print(error, file=sys.stderr)
                return 1
            print(f"\n{name}, {time.monotonic() - began:.0f} s\n{table(group.rows)}", flush=True)
            for left_out, why in group.raw.get("left out", {}).items():
                print(f"{left_out} takes no part: {why}", flush=True)
            if not options.quick:
                write(path, name, group, of_part)
    if not options.quick:
        show(path)
    return 0


def split(part: str, plan: Plan) -> list[tuple[str, Plan]]:
    """Return what is measured, and written, by itself: the kills of a workload take long."""
    if part != "kills":
        return [(part, plan)]
    return [(f"kills of {each}", replace(plan, workloads=(each,))) for each in plan.workloads]


def show(path: Path) -> None:
    """Write a results file as tables, and the seconds after a kill as a picture."""
    results = page(path, "Recovery")
    if found := [group for name, group in results.items() if name.startswith("kills")]:
        there, rows = found[0]["machine"], [row for group in found for row in group["rows"] if row["unit"]]
        caption = f"Seconds from a SIGKILL of one rank to the next step. {there['processor']}, {there['cores']} cores"
        draw_rows(path.with_suffix(".png"), rows, caption)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
