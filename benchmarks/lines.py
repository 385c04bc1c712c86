"""Small costs of the loop, as differences between runs of one program: a log line, an epoch's end, collectives."""

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise

from benchmarks.competitors import ours
from benchmarks.player import Seat
from benchmarks.results import Group, Row, Settings, raw_turns
from benchmarks.turns import Entry, Session, Spread, module, session

LOG_STEPS, LOG_GOAL_US = 500, 10.0
EPOCH_STEPS, ENDS, END_GOAL_MS = 10, 10, 0.5
COLLECTIVES_GOAL = 0.05  # a log line every 50 steps is 0.02, agreeing about once a second on whether to stop the rest


def measure(settings: Settings) -> Group:
    """Measure all three."""
    count = 1 if settings.quick else settings.sessions
    logs = [session(log_entries(settings), LOG_STEPS, 15 if settings.quick else 50, LOG_STEPS) for _ in range(count)]
    turns = EPOCH_STEPS * ENDS
    ends = [session(end_entries(settings), turns, 15 if settings.quick else 50, turns) for _ in range(count)]
    raw = {"log line": raw_turns(logs), "epoch's end": raw_turns(ends)}
    micros = Spread.of([[1e6 * more / LOG_STEPS for more in difference(each, "logs", "silent")] for each in logs])
    rows = [Row("log line every 50 steps and bar, a step", "", micros, LOG_GOAL_US, unit="µs")]
    by_hand = [end_cost(each, "tutorial") for each in ends]
    mine = [end_cost(each, "ours") for each in ends]
    more = [[a - b for a, b in zip(*pair, strict=True)] for pair in zip(mine, by_hand, strict=True)]
    rows.append(Row("epoch's end", "ours - tutorial", Spread.of(more), END_GOAL_MS, unit="ms"))
    rows.append(Row("epoch's end", "tutorial", Spread.of(by_hand), unit="ms"))
    if "lightning" in ends[0]:
        rows.append(
            Row("epoch's end", "lightning", Spread.of([end_cost(each, "lightning") for each in ends]), unit="ms")
        )
    if 2 in settings.ranks:
        rows.append(
            Row("collectives of its own a step, 2 ranks", "", collectives(settings), COLLECTIVES_GOAL, unit="calls")
        )
    return Group(rows, raw)


def log_entries(settings: Settings) -> list[Entry]:
    """Return this package with what it shows and writes by default, and with none of it."""
    seat = Seat("logs", device=settings.device)
    silent = ("logger=none", "trainer.progress=false", f"trainer.log_every_n_steps={10**9}")
    return [
        Entry(seat, ours.with_overrides("checkpoint=none"), joins=False),
        Entry(replace(seat, name="silent"), ours.with_overrides("checkpoint=none", *silent), joins=False),
    ]


def end_entries(settings: Settings) -> list[Entry]:
    """Return everyone twice: with epochs of a few steps, and with long ones. Nothing is evaluated or saved."""
    not_due = f"checkpoint.every_n_steps={10**9}"
    programs = [("tutorial", module("tutorial"), True), ("ours", ours.with_overrides(not_due), False)]
    if not settings.quick and settings.peers and find_spec("lightning"):
        programs.append(("lightning", module("lightning_"), True))
    return [
        Entry(Seat(f"{name}{kind}", device=settings.device, epoch_steps=steps), command, joins)
        for name, command, joins in programs
        for kind, steps in (("", EPOCH_STEPS), (", long epochs", None))
    ]


def end_cost(turns: Session, name: str) -> list[float]:
    """Return the milliseconds that an epoch's end costs, round by round."""
    return [1e3 * more / ENDS for more in difference(turns, name, f"{name}, long epochs")]


def difference(turns: Session, name: str, other: str) -> list[float]:
    """Return the seconds that a turn of one takes longer than the other's, round by round."""
    return [turn.seconds - beside.seconds for turn, beside in zip(turns[name], turns[other], strict=True)]


def collectives(settings: Settings) -> Spread:
    """Count this package's own collectives a step, DDP's aside."""
    seat = Seat("ours", ranks=2, device=settings.device, option="collectives")
    counts: Sequence[int] = [
        turn.rank0["collectives"] for turn in session([Entry(seat, ours.command, joins=False)], 500, 3, 500)["ours"]
    ]
    return Spread.of([[(after - before) / 500 for before, after in pairwise(counts)]])
