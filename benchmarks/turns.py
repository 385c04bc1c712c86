"""Competitors in processes of their own, which take turns: of any two figures, both were taken in the same minute."""

import json
import select
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.competitor import Competitor, Failed, Turn
from benchmarks.player import Seat

START_S = 180.0  # for a competitor to get ready for its first step
TURN_S = 600.0


@dataclass(frozen=True)
class Entry:
    """A competitor that can be started.

    Attributes:
        seat: what its ranks are told.
        command: makes the command line of its program.
        joins: whether one process a rank is started, with the variables of torchrun; else one that starts the others.
    """

    seat: Seat
    command: Callable[[Seat], Sequence[str]]
    joins: bool = True


Session = dict[str, list[Turn]]
"""Turns by competitor, a list of as many rounds for each."""


class Table:
    """The referee: starts competitors, and gives each the turn while the others wait."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self.folder = Path(
            self._stack.enter_context(
                tempfile.TemporaryDirectory(prefix="ddp_recipes_bench_", ignore_cleanup_errors=True)
            )
        )
        self.address = str(self.folder / "referee")
        self._listener = self._stack.enter_context(socket.socket(socket.AF_UNIX))
        self._listener.bind(self.address)
        self._listener.listen(64)
        self._competitors: list[Competitor] = []

    def __enter__(self) -> "Table":
        return self

    def __exit__(self, *exception: object) -> None:
        for competitor in self._competitors:
            competitor.stop()
        self._stack.close()

    def start(self, entries: Sequence[Entry]) -> list[Competitor]:
        """Start competitors, and wait until each rank of each is about to take its first step.

        Raises:
            Failed: one of them does not get there; the message ends with what it printed.
        """
        competitors = []
        for entry in entries:
            directory = self.folder / str(len(self._competitors))
            directory.mkdir()
            seat = replace(entry.seat, address=self.address, directory=str(directory))
            competitor = Competitor(seat, entry.command(seat), entry.joins)
            self._competitors.append(competitor)
            competitors.append(competitor)
            competitor.start()
        by_name = {competitor.seat.name: competitor for competitor in competitors}
        deadline = time.monotonic() + START_S
        while missing := [each for each in competitors if len(each.channels) < each.seat.ranks]:
            dead = [each for each in missing if any(process.poll() is not None for process in each.processes)]
            if dead or time.monotonic() > deadline:
                late = (dead or missing)[0]
                raise Failed(f"{late.seat.name} did not start.\n{late.last_words()}")
            if not select.select([self._listener], [], [], 0.2)[0]:
                continue
            connection, _ = self._listener.accept()
            connection.settimeout(TURN_S)
            channel = connection.makefile("rw")
            hello = json.loads(channel.readline())
            by_name[hello["name"]].channels[hello["rank"]] = channel
        return competitors


def module(name: str) -> Callable[[Seat], list[str]]:
    """Return the command that runs a module of ``competitors``."""
    return lambda seat: [sys.executable, "-m", f"benchmarks.competitors.{name}"]


def race(
    competitors: Sequence[Competitor],
    steps: int,
    rounds: int,
    warm_up: int,
    after: Callable[[Competitor], None] = lambda competitor: None,
) -> Session:
    """Let started competitors take turns of ``steps`` steps, ``rounds`` times, after ``warm_up`` untimed steps each.

    Each round begins with another one, so that nobody always follows the same. ``after`` is called after each turn.
    """
    for competitor in competitors:
        competitor.turn(warm_up)
    turns: Session = {competitor.seat.name: [] for competitor in competitors}
    for number in range(rounds):
        first = number % len(competitors)
        for competitor in (*competitors[first:], *competitors[:first]):
            turns[competitor.seat.name].append(competitor.turn(steps))
            after(competitor)
    return turns


def session(entries: Sequence[Entry], steps: int, rounds: int, warm_up: int) -> Session:
    """Start competitors afresh, let them race, and end them."""
    with Table() as table:
        return race(table.start(entries), steps, rounds, warm_up)


@dataclass(frozen=True)
class Spread:
    """A median, and what lies around it: the sessions, or within one session the middle half of its rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, sessions: Sequence[Sequence[float]]) -> "Spread":
        """Return the median over sessions of the median over each one's rounds."""
        medians = [statistics.median(rounds) for rounds in sessions]
        if len(sessions) > 1 or len(sessions[0]) < 2:
            return cls(statistics.median(medians), min(medians), max(medians))
        low, middle, high = statistics.quantiles(sessions[0], n=4, method="inclusive")
        return cls(middle, low, high)
