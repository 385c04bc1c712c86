"""A run whose ranks are killed, watched through the journals that its ranks keep."""

import math
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.campaign.processes import Start, kill
from benchmarks.competitor import Failed
from benchmarks.samples import python_path
from benchmarks.turns import Entry

START_S = 180.0  # for a run to get to its first checkpoint, and for one that was disturbed to get on
POLL_S = 0.01


@dataclass(frozen=True, order=True)
class Line:
    """A step that a rank has finished: when, which, who, and how many ranks took part."""

    at: float
    step: int
    rank: int
    pid: int
    ranks: int


@dataclass(frozen=True)
class Kill:
    """A rank that was killed, and what came of it.

    Attributes:
        at: when, on the clock that all processes share.
        step: the last step that any rank had finished.
        next_s: until all ranks that were left, or all, had finished a step that none had.
        whole_s: until all ranks had, the killed one's replacement among them.
    """

    at: float
    rank: int
    step: int
    next_s: float
    whole_s: float


class Run:
    """A run of an entry, in a folder of its own, as long as the context lasts."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.ranks = entry.seat.ranks
        self._folder = tempfile.TemporaryDirectory(prefix="ddp_recipes_kills_", ignore_cleanup_errors=True)
        self.folder = Path(self._folder.name)
        self.lines: list[Line] = []
        self._read_to = [0] * self.ranks

    def __enter__(self) -> "Run":
        (self.folder / "journal").mkdir()
        seat = replace(self.entry.seat, directory=str(self.folder))
        environ = {**seat.environ(), "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        self._start = Start(self.entry.command(seat), self.folder, self.folder / "output.txt", environ)
        return self

    def __exit__(self, *exception: object) -> None:
        self._start.kill_all()
        self._folder.cleanup()

    def read(self) -> None:
        """Take what ranks have noted meanwhile."""
        for rank in range(self.ranks):
            journal = self.folder / "journal" / str(rank)
            if not journal.exists():
                continue
            with journal.open("rb") as file:
                file.seek(self._read_to[rank])
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._read_to[rank] += len(whole)
            for noted in whole.decode().splitlines():
                at, step, pid, ranks = noted.split()
                self.lines.append(Line(float(at), int(step), rank, int(pid), int(ranks)))

    def until(self, true: Callable[[], bool], seconds: float = START_S) -> None:
        """Wait until something is true of what ranks have noted.

        Raises:
            Failed: the run has ended, or takes too long.
        """
        deadline = time.monotonic() + seconds
        while True:
            running = self._start.running
            self.read()
            if true():
                return
            if not running or time.monotonic() > deadline:
                what = f"was not there after {seconds:.0f} s" if running else "has ended"
                raise Failed(f"{self.entry.seat.name} {what}.\n{self._start.text()[-4000:]}")
            time.sleep(POLL_S)

    def ended(self, seconds: float = START_S) -> None:
        """Wait for its end.

        Raises:
            Failed: it does not come, or in a bad way.
        """
        deadline = time.monotonic() + seconds
        while self._start.running and time.monotonic() < deadline:
            time.sleep(POLL_S)
        if self._start.process.returncode != 0:
            raise Failed(f"{self.entry.seat.name}: {self._start.process.returncode}\n{self._start.text()[-4000:]}")
        self.read()

    def started(self) -> None:
        """Wait until all ranks have trained past the first checkpoint."""
        steps = max(2, self.entry.seat.save_every + 1)
        self.until(lambda: len({line.rank for line in self.lines if line.step >= steps}) == self.ranks)

    def kill(self, rank: int) -> Kill:
        """Kill a rank, and wait until the run has all its ranks again.

        Raises:
            Failed: it does not come to that.
        """
        self.read()
        pid = next(line.pid for line in reversed(self.lines) if line.rank == rank)
        at = time.monotonic()
        kill(pid, signal.SIGKILL)
        self.read()
        step = max(line.step for line in self.lines if line.at <= at)
        everyone = set(range(self.ranks))

        def times() -> list[float]:
            """Return when those that are left had finished a new step without it, and all ranks one with another."""
            new = [line for line in self.lines if line.at > at and line.step > step and line.pid != pid]
            without = finished([line for line in new if line.ranks < self.ranks], everyone - {rank})
            return [without, finished([line for line in new if line.ranks == self.ranks], everyone)]

        self.until(lambda: times()[1] < math.inf)
        without, whole = times()
        return Kill(at, rank, step, min(without, whole) - at, whole - at)


def finished(lines: Sequence[Line], ranks: set[int]) -> float:
    """Return when a step was first finished by all these ranks."""
    steps: dict[int, dict[int, float]] = {}
    for line in lines:
        steps.setdefault(line.step, {})[line.rank] = line.at
    return min((max(at[rank] for rank in ranks) for at in steps.values() if ranks <= at.keys()), default=math.inf)


def kill_at_random(entry: Entry, kills: int, delay: tuple[float, float], seed: int) -> tuple[list[Kill], list[str]]:
    """Kill a random rank at a random instant, so often; return those that were survived, and how the others failed.

    Instants are drawn anew from ``delay`` seconds since the run had all its ranks; a run that fails is started again.

    Raises:
        Failed: the run does not start.
    """
    draw = random.Random(seed)
    found: list[Kill] = []
    failed: list[str] = []
    while len(found) + len(failed) < kills:
        with Run(entry) as run:
            run.started()
            try:
                while len(found) + len(failed) < kills:
                    time.sleep(draw.uniform(*delay))
                    found.append(run.kill(draw.randrange(run.ranks)))
            except Failed as error:
                failed.append(str(error))
    return found, failed


def lost_share(entry: Entry, seconds: float, every: float, seed: int) -> float:
    """Kill a random rank every so many seconds; return the share of the time in which nothing was trained.

    Between two recoveries all time counts. From a kill until all ranks are back each new step counts at most the usual
    time of one, and of that the share of the ranks that took part.

    Raises:
        Failed: the run does not start, or does not survive.
    """
    draw = random.Random(seed)
    kills: list[Kill] = []
    with Run(entry) as run:
        run.started()
        begin = time.monotonic()
        due = begin + draw.uniform(0, every)
        while due < begin + seconds:
            time.sleep(max(0.0, due - time.monotonic()))
            kills.append(run.kill(draw.randrange(run.ranks)))
            due += every
        time.sleep(max(0.0, begin + seconds - time.monotonic()))
        run.read()
        seconds = time.monotonic() - begin
    last, before, gaps = 0, begin, []
    for line in sorted(run.lines):
        if line.step > last:
            last = line.step
            if line.at > begin:
                # Any overlap: a survivor may have noted a step between the kill and its own end.
                recovers = any(kill.at < line.at and before < kill.at + kill.whole_s for kill in kills)
                gaps.append((line.at - before, line.ranks / run.ranks, recovers))
                before = line.at
    usual = statistics.median(gap for gap, _, recovers in gaps if not recovers)
    trained = sum(share * min(gap, usual) if recovers else gap for gap, share, recovers in gaps)
    return 1 - trained / seconds


def train_to_end(entry: Entry, kill_after: int | None) -> tuple[dict[str, Tensor], int]:
    """Train to the end, with a rank killed once a step is done if ``kill_after`` names one.

    Returns:
        The weights that were trained, and on how many batches: each rank has one in each step.

    Raises:
        Failed: it does not come to the end.
    """
    with Run(entry) as run:
        if kill_after is not None:
            run.until(lambda: any(line.step >= kill_after for line in run.lines))
            run.kill(run.ranks - 1)
        run.ended()
        weights = torch.load(run.folder / "weights.pt", weights_only=True)
    return weights, sum({line.step: line.ranks for line in sorted(run.lines, key=lambda line: line.ranks)}.values())
