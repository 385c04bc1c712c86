"""From the command to the end of the first step, and memory: each competitor alone, in turns."""

import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from benchmarks.competitors import ours
from benchmarks.player import Seat
from benchmarks.results import Group, Row, Settings, in_ranks
from benchmarks.turns import Entry, Spread, Table, module

EPOCH_STEPS = 100
STEPS = 200  # after the first: two epochs, hence two checkpoints, and four log lines
GOALS = {2: 0.90}
IMPORT = "import time; began = time.perf_counter(); import ddp_recipes; print((time.perf_counter() - began) * 1e3)"


@dataclass(frozen=True)
class Start:
    """A start, and some steps.

    Attributes:
        seconds: from the command to the end of the first step on the last rank.
        peak_mb: most memory of a rank, with what it shares.
        all_mb: memory of all processes in the end; what they share counts once.
        heavy: modules on ``player.HEAVY`` that rank 0 has loaded.
    """

    seconds: float
    peak_mb: float
    all_mb: float
    heavy: Sequence[str]


Starts = dict[str, list[Start]]


def measure(settings: Settings) -> Group:
    """Measure start-up at each number of ranks, and what is loaded on the way."""
    rows: list[Row] = []
    raw = {}
    for ranks in settings.ranks if not settings.quick else (2,):
        starts = take_turns(competitors(ranks, settings), 3 if settings.quick else 2 * settings.sessions + 1)
        raw[in_ranks(ranks)] = raw_starts(starts)
        title = f"start to first step, {in_ranks(ranks)}"
        seconds = {name: [start.seconds for start in each] for name, each in starts.items()}
        for name in list(starts)[1:]:
            ratios = [each / by_hand for each, by_hand in zip(seconds[name], seconds["by hand"], strict=True)]
            goal = GOALS.get(ranks) if name == "ours" else None
            rows.append(Row(title, f"{name} / by hand", Spread.of([ratios]), goal))
        rows += [Row(title, name, Spread.of([each]), unit="s") for name, each in seconds.items()]
    imports = [float(subprocess.check_output([sys.executable, "-c", IMPORT])) for _ in range(5)]
    rows.append(Row("import ddp_recipes", "", Spread.of([imports]), 50, unit="ms"))
    if not settings.quick:
        needless = needless_modules()
        rows.append(Row("needless modules", ", ".join(needless), Spread.of([[len(needless)]]), 0, unit="modules"))
    return Group(rows, raw)


def measure_memory(settings: Settings) -> Group:
    """Measure the memory of a rank against the script's, and of all processes together."""
    rows: list[Row] = []
    raw = {}
    for ranks in settings.ranks:
        starts = take_turns(competitors(ranks, settings), 1 if settings.quick else 3, STEPS)
        raw[in_ranks(ranks)] = raw_starts(starts)
        peaks = {name: [start.peak_mb for start in each] for name, each in starts.items()}
        by_hand = statistics.median(peaks["by hand"])
        title = f"peak memory a rank, {in_ranks(ranks)}"
        for name in list(starts)[1:]:
            more = Spread.of([[peak - by_hand for peak in peaks[name]]])
            rows.append(Row(title, f"{name} - by hand", more, 30 if name == "ours" else None, unit="MB"))
        rows += [Row(title, name, Spread.of([each]), unit="MB") for name, each in peaks.items()]
        rows += [
            Row(
                f"memory of all processes, {in_ranks(ranks)}",
                name,
                Spread.of([[start.all_mb for start in each]]),
                unit="MB",
            )
            for name, each in starts.items()
        ]
    return Group(rows, raw)


def raw_starts(starts: Starts) -> dict[str, list[dict[str, object]]]:
    """Return every start as plain data."""
    return {name: [asdict(start) for start in each] for name, each in starts.items()}


def take_turns(entries: Sequence[Entry], rounds: int, steps: int = 0) -> Starts:
    """Start each in turn, alone."""
    starts: Starts = {entry.seat.name: [] for entry in entries}
    for number in range(rounds):
        first = number % len(entries)
        for entry in (*entries[first:], *entries[:first]):
            starts[entry.seat.name].append(start(entry, steps))
    return starts


def start(entry: Entry, steps: int) -> Start:
    """Start one competitor, let it take its first step and ``steps`` more."""
    with Table() as table:
        (competitor,) = table.start([entry])
        turn = competitor.turn(1)
        seconds = turn.at - competitor.started
        if steps:
            turn = competitor.turn(steps)
        everyone = memory_of([process.pid for process in competitor.processes])
        return Start(seconds, turn.peak / 1e6, everyone / 1e6, turn.rank0["heavy"])


def memory_of(processes: Sequence[int]) -> int:
    """Return the memory of processes and all that they started, in bytes (Linux's PSS); 0 where it is not known."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has just ended
            continue
    family = set(processes)
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    total = 0
    for pid in family:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


def competitors(ranks: int, settings: Settings) -> list[Entry]:
    """Return who starts, the script first: this package, and peers with launchers of their own."""
    seat = Seat("by hand", ranks=ranks, device=settings.device, epoch_steps=EPOCH_STEPS)
    entries = [
        Entry(seat, module("script"), joins=False),
        Entry(replace(seat, name="ours", option="bare"), ours.command, joins=False),
    ]
    if settings.peers and ranks > 1:
        entries.append(Entry(replace(seat, name="torchrun"), torchrun("script"), joins=False))
    if settings.peers and find_spec("accelerate"):
        entries.append(Entry(replace(seat, name="accelerate"), torchrun("accelerate_"), joins=False))
    if settings.peers and find_spec("lightning"):
        entries.append(Entry(replace(seat, name="lightning"), module("lightning_"), joins=False))
    return entries


def torchrun(program: str) -> Callable[[Seat], list[str]]:
    """Return the command that starts a program with torchrun; with one rank, by itself."""

    def command(seat: Seat) -> list[str]:
        if seat.ranks == 1:
            return module(program)(seat)
        options = ["--standalone", f"--nproc-per-node={seat.ranks}", "-m", f"benchmarks.competitors.{program}"]
        return [sys.executable, "-m", "torch.distributed.run", *options]

    return command


def needless_modules() -> Sequence[str]:
    """Return what a run loads that neither logs to TensorBoard nor has images, tables or torchmetrics."""
    return start(Entry(Seat("ours", option="bare"), ours.with_overrides("logger=none"), joins=False), 100).heavy
