"""What a checkpoint costs the loop: ResNet-50 with momentum, 205 MB, saved at the first step of every other turn.

Judged by what a turn with a save takes beyond the one before, of the same process: a stall alone would not show a loop
that is slow for a second because a thread holds the interpreter lock.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.competitor import Competitor, Failed
from benchmarks.competitors import ours
from benchmarks.competitors.saving import EVERY, TURN
from benchmarks.player import Seat
from benchmarks.results import Group, Row, Settings, raw_turns
from benchmarks.turns import Entry, Session, Spread, Table, module, race

EXTRA_GOAL, STALL_GOAL = 0.50, 0.25
SYNCHRONOUS = "torch.save"


def measure(settings: Settings) -> Group:
    """Measure extra time and stall of each way to save."""
    sessions = [run(settings) for _ in range(1 if settings.quick else settings.sessions)]
    names = list(sessions[0])
    rows = []
    for name in names:
        if name != SYNCHRONOUS:
            goals = (EXTRA_GOAL, STALL_GOAL) if name == "ours" else (None, None)
            against = [[extra(session, name) / extra(session, SYNCHRONOUS)] for session in sessions]
            rows.append(Row("checkpoint, extra time", f"{name} / {SYNCHRONOUS}", Spread.of(against), goals[0]))
            stalls = [[stall(session, name) / stall(session, SYNCHRONOUS)] for session in sessions]
            rows.append(Row("checkpoint, stall", f"{name} / {SYNCHRONOUS}", Spread.of(stalls), goals[1]))
    for name in names:
        rows.append(Row("checkpoint, extra time", name, ms([extra(each, name) for each in sessions]), unit="ms"))
        rows.append(Row("checkpoint, stall", name, ms([stall(each, name) for each in sessions]), unit="ms"))
    return Group(rows, raw_turns(sessions))


def ms(seconds: Sequence[float]) -> Spread:
    """Return figures of sessions in milliseconds."""
    return Spread.of([[each * 1e3] for each in seconds])


def extra(session: Session, name: str) -> float:
    """Return the seconds that a save adds to a turn: the median over rounds."""
    plain, saving = session[name][::2], session[name][1::2]
    return statistics.median(turn.seconds - before.seconds for before, turn in zip(plain, saving, strict=True))


def stall(session: Session, name: str) -> float:
    """Return the seconds that the step with the save takes longer than the median one."""
    return statistics.median(turn.stall for turn in session[name][1::2])


def run(settings: Settings) -> Session:
    """Run one session.

    Raises:
        Failed: a save outlasted its turn, so that others paid for it.
    """

    def is_written(competitor: Competitor) -> None:
        if left := list(Path(competitor.seat.directory, "run", "checkpoints").glob(".*.part")):
            raise Failed(f"{competitor.seat.name}: {left[0].name} is still being written after {TURN} steps.")

    with Table() as table:
        return race(table.start(entries(settings)), TURN, 4 if settings.quick else 16, TURN, after=is_written)


def entries(settings: Settings) -> list[Entry]:
    """Return each way to save."""

    def seat(name: str, option: str = "") -> Seat:
        return Seat(name, workload="resnet50", device=settings.device, option=option)

    every = f"checkpoint.every_n_steps={EVERY}"
    found = [
        Entry(seat(SYNCHRONOUS), module("saving")),
        Entry(seat("ours"), ours.with_overrides(every, "checkpoint.async_save=true"), joins=False),
    ]
    if not settings.quick:
        found += [
            Entry(seat("torch.save on a thread", "thread"), module("saving")),
            Entry(seat("ours, sync"), ours.with_overrides(every, "checkpoint.async_save=false"), joins=False),
        ]
    return found
