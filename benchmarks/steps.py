"""Step times: everybody trains the same, in turns."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec

from benchmarks.competitor import Failed
from benchmarks.competitors import ours
from benchmarks.player import Seat
from benchmarks.results import Group, Row, Settings, in_ranks, raw_turns
from benchmarks.turns import Entry, Session, Spread, module, session
from benchmarks.workloads import get

PEERS = (  # name, package, program, option
    ("fabric", "lightning", "fabric", ""),
    ("accelerate", "accelerate", "accelerate_", ""),
    ("lightning barebones", "lightning", "lightning_", "barebones"),
    ("lightning", "lightning", "lightning_", ""),
    ("lightning, loss in the bar", "lightning", "lightning_", "log"),
)


@dataclass(frozen=True)
class Race:
    """How one workload is measured.

    Attributes:
        steps: of a turn, by number of ranks; ``None``: an epoch, with what a tool does at its end.
        rounds: turns of each in a session; in a quick run ``quick_rounds``, at ``quick_ranks``.
        goals: ours against another competitor, by number of ranks.
    """

    workload: str
    steps: Mapping[int, int] | None
    rounds: int
    quick_rounds: int
    goals: Mapping[tuple[int, str], float]
    quick_ranks: tuple[int, ...] = (1, 2)


RACES = {
    # Ours draws its bar five times a second, and always once after it had to wait for its turn.
    "toy": Race("toy", {1: 500, 2: 250}, 15, 8, {(1, "tutorial"): 0.80, (1, "fast"): 1.08, (2, "tutorial"): 0.97}),
    "mnist": Race(
        "mnist", None, 6, 3, {(1, "tutorial"): 0.20, (1, "fast"): 1.05, (2, "tutorial"): 0.40}, quick_ranks=(1,)
    ),
    "resnet": Race("resnet18", {1: 5, 2: 5}, 15, 3, {(1, "tutorial"): 1.02, (2, "tutorial"): 0.98}, quick_ranks=(1,)),
}
GPU_RACES = {
    "toy": Race("toy", {1: 500}, 15, 5, {}),
    "mnist": Race("mnist", None, 6, 3, {(1, "tutorial"): 1 / 3}),
    "resnet": Race("resnet50_gpu", {1: 40}, 10, 3, {(1, "fast"): 1.01}),
    "transformer": Race("transformer", {1: 100}, 10, 3, {}),
}


def measure(name: str, settings: Settings) -> Group:
    """Measure one workload at each number of ranks.

    Raises:
        Failed: a competitor did not do the same work.
    """
    race = (GPU_RACES if settings.device == "cuda" else RACES)[name]
    rounds = race.quick_rounds if settings.quick else race.rounds
    rows: list[Row] = []
    raw = {}
    for ranks in settings.ranks:
        if settings.quick and ranks not in race.quick_ranks:
            continue
        steps = turn_steps(race, ranks)
        short = max(2, steps // 5)
        if not settings.quick or (name == "toy" and ranks > 1):
            alone = entries(race.workload, ranks, replace(settings, peers=False), shuffle=False)
            rounding = 0.03 if get(race.workload).bfloat16 else 0.001
            title = f"{race.workload}, {in_ranks(ranks)}"
            check_numbers(title, session(alone, short, rounds=3, warm_up=short), rounding)
        sessions = []
        for _ in range(settings.sessions):
            sessions.append(session(entries(race.workload, ranks, settings), steps, rounds, warm_up=steps))
            check_losses(sessions[-1])
        rows += rows_of(race, ranks, sessions)
        raw[in_ranks(ranks)] = raw_turns(sessions)
    return Group(rows, raw)


def check_numbers(title: str, turns: Session, rounding: float) -> None:
    """Compare the losses of those that took samples in the same order: only rounding may lie between them.

    Fused kernels round otherwise than plain ones, and training magnifies that: after the first turn, ten times that.
    """
    curves = {name: [turn.level or 0.0 for turn in each] for name, each in turns.items()}
    for name, curve in curves.items():
        for turn, (level, expected) in enumerate(zip(curve, curves["tutorial"], strict=True)):
            if abs(level - expected) > rounding * expected * (10 if turn else 1):
                raise Failed(f"{title}: {name} does not give the tutorial's numbers. Losses after each turn: {curves}")
    shown = "  ".join(f"{level:.6f}" for level in curves["tutorial"])
    print(f"{title}: {', '.join(curves)} agree on the losses {shown}", flush=True)


def check_losses(turns: Session) -> None:
    """Compare the losses of those that took samples in orders of their own: roughly, all have learnt the same."""
    reached = {name: each[-1].level or 0.0 for name, each in turns.items()}
    for name, level in reached.items():
        if abs(level - reached["tutorial"]) > 0.5 * reached["tutorial"] + 0.05:
            raise Failed(f"{name} did not learn what the tutorial's loop learnt. Losses: {reached}")


def turn_steps(race: Race, ranks: int) -> int:
    """Return how many steps a turn has."""
    if race.steps is not None:
        return race.steps[min(ranks, max(race.steps))]
    workload = get(race.workload)
    return -(-len(workload.tensors()[1]) // (workload.batch_size * ranks))


def entries(workload: str, ranks: int, settings: Settings, shuffle: bool = True) -> list[Entry]:
    """Return who takes part."""
    seat = Seat("", workload=workload, ranks=ranks, device=settings.device, shuffle=shuffle)
    return [
        Entry(replace(seat, name="tutorial"), module("tutorial")),
        Entry(replace(seat, name="fast"), module("fast")),
        Entry(replace(seat, name="ours"), ours.command, joins=False),
        *peers(seat, settings),
    ]


def peers(seat: Seat, settings: Settings) -> list[Entry]:
    """Return the peers that are installed; say which are not."""
    if not settings.peers:
        return []
    for package in sorted({package for _, package, _, _ in PEERS}):
        if find_spec(package) is None:
            print(f"{package} is not installed and takes no part; make bench installs it", file=sys.stderr)
    return [
        Entry(replace(seat, name=name, option=option), module(program))
        for name, package, program, option in PEERS
        if find_spec(package) is not None
    ]


def rows_of(race: Race, ranks: int, sessions: Sequence[Session]) -> list[Row]:
    """Return ours against the hand-written loops, the others against the tutorial's, then everybody's step time."""
    title = f"{race.workload} {'epoch' if race.steps is None else 'step'}, {in_ranks(ranks)}"
    pairs = [("ours", "tutorial"), ("ours", "fast")]
    pairs += [(name, "tutorial") for name in sessions[0] if name not in ("tutorial", "ours")]
    sums = [[sum(turn.seconds for turn in session[name]) for name in ("ours", "tutorial")] for session in sessions]
    with_ends = Spread.of([[mine / theirs] for mine, theirs in sums])
    ratios = [
        Row(
            title,
            f"{name} / {other}",
            ratio(sessions, name, other),
            race.goals.get((ranks, other)) if name == "ours" else None,
        )
        for name, other in pairs
    ]
    times = [
        Row(f"{race.workload} step, {in_ranks(ranks)}", name, step_time(sessions, name), unit="µs")
        for name in sessions[0]
    ]
    return [*ratios, Row(title, "ours / tutorial, sum of all turns", with_ends), *times]


def step_time(sessions: Sequence[Session], name: str) -> Spread:
    """Return the time of a competitor's step in microseconds."""
    return Spread.of([[turn.seconds / turn.steps * 1e6 for turn in session[name]] for session in sessions])


def ratio(sessions: Sequence[Session], name: str, other: str) -> Spread:
    """Return the time of one competitor against another's, taken round by round."""
    return Spread.of(
        [
            [turn.seconds / beside.seconds for turn, beside in zip(session[name], session[other], strict=True)]
            for session in sessions
        ]
    )
