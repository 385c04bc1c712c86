"""Play a script: start the run, do to it what is written, and start the same command again until it has finished."""

import json
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks import cluster
from benchmarks.campaign import files, replacing
from benchmarks.campaign.nodes import NodesStart
from benchmarks.campaign.processes import Start, command, kill
from benchmarks.campaign.script import COMMON, IN_STEP, INSIDE, KINDS, ON_NODES, RECIPES, Fault, Script
from benchmarks.campaign.seen import Done, Played, Started
from benchmarks.cluster import Cluster

PATH = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
GONE_S = 10.0  # what the contract gives a run to be gone, however it ended
LATE_S = 5.0  # that the store answers nothing
PATIENCE_S = 60.0  # for a start to end after something was done to it
SLEEP_S = 0.05  # in each step of a run on nodes, for which 60 steps would soon be over
TIMED = ("starting", "replacing", "returning")
START_S = 180.0  # for a start to get where something is to be done, or to its end, on a busy machine


cut_off = threading.Event()  # set it, and whoever plays raises CutOff and leaves nothing running


class CutOff(Exception):
    """The campaign is to end before its time."""


class Player:
    """Plays one script in a folder.

    Args:
        strategy: the overrides that choose it.
        in_parts: whether ranks write checkpoints together.
    """

    def __init__(self, script: Script, folder: Path, strategy: Sequence[str], in_parts: bool = False) -> None:
        self.script = script
        self.folder = folder
        self.directory = folder / "disk" / "run"
        self.todo = deque(script.faults)
        self.instants = files.IN_PARTS if in_parts else files.WHOLE
        self.before = 0  # lines of the journal that are about earlier ranks
        self.played = Played(script, replacing.copies(strategy, script.world_sizes[0]))
        self._slurm: Cluster | None = None
        self.overrides = [
            *COMMON,
            *RECIPES[script.recipe].overrides,
            *strategy,
            f"launcher.timeout_s={script.timeout_s}",
            f"hydra.run.dir={self.directory}",
            "ckpt_path=auto",
        ]

    def play(self) -> Played:
        """Start it again and again; return what was seen."""
        self.directory.parent.mkdir(parents=True)
        (self.folder / "journal").touch()
        small = any(fault.kind == "disk_full" for fault in self.script.faults)
        with files.small_disk(self.directory.parent, small), ExitStack() as stack:
            if self.script.mode in ON_NODES:  # of its own: a node is lost with all that Slurm has there
                self._slurm = stack.enter_context(cluster.running(cpus=2))
            for number, world_size in enumerate(self.script.world_sizes):
                self._start(number, world_size)
                (self.directory.parent / "filler").unlink(missing_ok=True)
                if self.played.finished:  # then no start would read what is damaged
                    break
                while self.todo and self.todo[0].place == "between":
                    self._damage(self.todo.popleft(), number)
            self.played.journal = self._journal()
        return self.played

    def _start(self, number: int, world_size: int) -> None:
        """Start the command, see it to its end, and note how that was."""
        script = self.script
        alone = script.mode == "local" and world_size == 1 and not script.max_restarts
        began, wall = time.monotonic(), time.time()
        self.before = len(self._journal())
        start = self._new(world_size, self.folder / f"start_{number}.txt", alone)
        try:
            ended = self._disturb(start, number, world_size)
            gone = start.gone(GONE_S)
            over = time.monotonic()
            orphans = 0 if gone or not ended else len(start.processes())
        finally:
            start.kill_all()
            for name in ("order.json", "slow"):
                (self.folder / name).unlink(missing_ok=True)
        outcome = files.outcome(self.directory, since=wall)
        self.played.starts.append(
            Started(world_size, alone, start.status, start.text(), over - began, not ended, orphans, outcome)
        )
        if outcome == "preempted" and any(word == "step" for _, word, _ in self._news()):  # else nothing is saved
            self._note("preempted", 0)
        if self.played.done and self.played.done[-1].start == number:
            self.played.done[-1].gone_s = over - self.played.done[-1].at

    def _new(self, world_size: int, output: Path, alone: bool) -> Start:
        script, environ = self.script, {"CAMPAIGN_FOLDER": str(self.folder), "PYTHONPATH": os.pathsep.join(PATH)}
        if self._slurm is not None:
            overrides = [*self.overrides, f"+callbacks.journal.sleep_s={SLEEP_S}"]
            in_file = script.mode == "any_node"
            return NodesStart(self._slurm, overrides, world_size // 2, self.folder, output, environ, in_file)
        words = command(script.mode, world_size, script.max_restarts, self.overrides)
        return Start(words, self.folder, output, environ, alone)

    def _disturb(self, start: Start, number: int, world_size: int) -> bool:
        """Do what is to be done in this start, in turn; return whether its process ended by itself."""
        patience = START_S
        since = time.monotonic()
        while self.todo and self.todo[0].place != "between":
            done = Done(self.todo[0], number, world_size, 0)
            if not self._do(done, start, since):
                break
            before = self.played.done[-1].step if self.played.done and self.script.goes_on else 0
            done.at, done.step = time.monotonic(), self._step() or before
            self.todo.popleft()
            self.played.done.append(done)
            patience = PATIENCE_S + self.script.timeout_s
            self.before = len(self._journal())
            if done.fault.kind == "terminate":  # what comes next is done to the next start
                break
            if self.script.goes_on or done.fault.kind == "stop_agent":  # the run goes on, and so does this
                done.restarted = True
                since = time.monotonic()
                continue
            restarts = KINDS[done.fault.kind].restarts and self.script.max_restarts > 0
            done.restarted = restarts and _until(lambda: self._seen("began"), start, patience)
            if not done.restarted:
                break
            since, patience = time.monotonic(), START_S
        return _until(lambda: not start.running, start, patience)

    def _do(self, done: Done, start: Start, since: float) -> bool:
        """Wait for the instant and do it; return whether it came to that before the start was over."""
        fault = done.fault
        if fault.place in (*INSIDE, *IN_STEP):
            return self._order(done, start)
        if fault.place in TIMED:
            due = _until(lambda: time.monotonic() >= since + fault.wait_s, start, START_S)
        else:
            due = _until(lambda: self._step() >= fault.step, start, START_S)
        if not due or not _until(lambda: self._find(done, start), start, START_S):
            return False
        if fault.place == "saving":
            last = self._step() + 2 * RECIPES[self.script.recipe].interval
            folder, seen = self.directory / "checkpoints", self.instants[int(1e6 * fault.share) % len(self.instants)]
            done.saving = _until(lambda: seen(folder) or self._step() > last, start, START_S, 0.0002) and seen(folder)
            done.seen = seen.__name__ if done.saving else None
        elif fault.place not in TIMED:
            _until(lambda: False, start, fault.wait_s)
        if not start.running:
            return False
        self._act(done, start)
        return True

    def _order(self, done: Done, start: Start) -> bool:
        """Have a rank do it to itself; return whether it came to that."""
        fault, order = done.fault, self.folder / "order.json"
        done.rank = fault.rank(self.script.may_be_hurt if self.script.goes_on else done.world_size)
        wanted = {"rank": done.rank, "place": fault.place, "step": fault.step, "kind": fault.kind}
        aside = order.with_suffix(".part")
        aside.write_text(json.dumps(wanted))
        aside.replace(order)
        _until(lambda: not order.exists(), start, START_S)
        _until(lambda: self._seen(fault.kind), start, 1)
        taken = [pid for pid, word, _ in self._news() if word == fault.kind]
        done.pid = taken[-1] if taken and not order.exists() else None
        return done.pid is not None

    def _find(self, done: Done, start: Start) -> bool:
        """Find the process that it is done to; return whether it is there."""
        kind = done.fault.kind
        if self.script.goes_on:
            return self._find_ranks(done, start)
        done.rank = done.fault.rank(done.world_size)
        if kind in ("kill_rank", "kill_rank_0", "stop_rank") or (kind == "usr1" and self.script.mode == "torchrun"):
            done.pid = start.rank(done.rank)
        elif kind == "kill_worker":
            done.pid = start.worker(done.rank)
        elif kind == "kill_server":
            done.rank, done.pid = None, start.server()
        else:
            done.rank, done.pid = None, start.pid
        return done.pid is not None

    def _find_ranks(self, done: Done, start: Start) -> bool:
        """Find ranks to which nothing was done yet."""
        done.rank = done.fault.rank(self.script.may_be_hurt)
        kind, hurt = done.fault.kind, {pid for each in self.played.done for pid in each.pids}
        if kind == "kill_two":
            other = (done.rank + 1) % done.world_size
            done.second = None if (pid := start.rank(other)) is None else (other, pid)
        if kind == "kill_worker" and (pid := start.rank(done.rank)) is not None:
            done.second = (done.rank, pid)  # which fails of it
        if kind == "stop_server" and (server := start.server()) is not None:
            done.second = (done.rank, server)
        if kind == "terminate":
            done.rank, done.pid = None, start.pid
            return True
        if isinstance(start, NodesStart) and kind == "return_node":
            done.rank = None
            return start.lost is not None
        if isinstance(start, NodesStart) and kind == "kill_node":
            done.rank, done.pid = None, start.task(_node(done, start))
            # Where either may be lost, the other one is to be in the run.
            there = len(start.may_lose) == 1 or all(map(start.rank, range(done.world_size)))
            return start.lost is None and done.pid is not None and there
        others = {start.rank(number) for number in range(done.world_size) if number != done.rank}
        if kind == "stop_rank" and not others - hurt - {None}:
            return False  # no other one would wait for it
        if kind == "kill_server":
            done.pid = start.server()
        else:
            done.pid = (start.worker if kind == "kill_worker" else start.rank)(done.rank)
        return (
            done.pid is not None
            and hurt.isdisjoint(done.pids)
            and len(done.pids) == 1 + (kind in ("kill_two", "kill_worker", "stop_server"))
        )

    def _act(self, done: Done, start: Start) -> None:  # noqa: C901, PLR0912 - a case for each kind of fault
        """Do what is done from outside."""
        if isinstance(start, NodesStart) and done.fault.kind == "return_node":
            start.return_node()
            return
        assert done.pid is not None
        if isinstance(start, NodesStart) and done.fault.kind == "kill_node":
            done.idle = start.lose_node(_node(done, start), done.pid)
            return
        if done.fault.kind == "kill_launcher":
            (self.folder / "slow").touch()
        match done.fault.kind:
            case "kill_rank" | "kill_rank_0" | "kill_launcher" | "kill_server" | "kill_worker":
                kill(done.pid, signal.SIGKILL)
            case "kill_two":
                for pid in done.pids:
                    kill(pid, signal.SIGKILL)
            case "kill_all":
                start.kill_all()
            case "stop_rank":
                kill(done.pid, signal.SIGSTOP)
            case "stop_server":
                assert done.second is not None
                kill(done.second[1], signal.SIGSTOP)
                kill(done.pid, signal.SIGKILL)
            case "stop_agent":
                kill(done.pid, signal.SIGSTOP)
                _until(lambda: False, start, LATE_S)
                kill(done.pid, signal.SIGCONT)
            case "terminate":
                kill(done.pid, signal.SIGTERM)
            case "usr1":
                kill(done.pid, signal.SIGUSR1)
            case "interrupt":
                _press_ctrl_c(start)
            case "interrupt_twice":
                _press_ctrl_c(start)
                _until(lambda: False, start, done.fault.pause_s)
                _press_ctrl_c(start)
            case "disk_full":
                files.fill(self.directory.parent)

    def _damage(self, fault: Fault, number: int) -> None:
        """Damage a file, if it is there."""
        damaged = files.damage(fault.kind, self.directory, fault.share)
        if damaged is not None:
            name, before = damaged
            self.played.done.append(Done(fault, number, 0, self._step(), file=name))
            if before >= 0:
                self._note("damaged", before)

    def _note(self, word: str, number: int) -> None:
        with (self.folder / "journal").open("a") as journal:
            journal.write(f"0 {word} {number}\n")

    def _journal(self) -> list[tuple[int, str, int]]:
        lines = (line.split() for line in (self.folder / "journal").read_text().splitlines())
        return [(int(pid), word, int(number)) for pid, word, number in lines]

    def _step(self) -> int:
        """Return the last step of the ranks that are there now."""
        words = (line for line in reversed(self._news()) if line[1] in ("began", "step"))
        return next((number for _, _, number in words), 0)

    def _news(self) -> list[tuple[int, str, int]]:
        return self._journal()[self.before :]

    def _seen(self, wanted: str) -> bool:
        return any(word == wanted for _, word, _ in self._news())


def _until(condition: Callable[[], object], start: Start, seconds: float, every: float = 0.004) -> bool:
    """Wait until a condition holds, the start has ended or the time is over; return whether the condition holds.

    Raises:
        CutOff: the campaign is cut off.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if cut_off.is_set():
            raise CutOff
        if not start.running or time.monotonic() > deadline:
            return bool(condition())
        time.sleep(every)
    return True


def _node(done: Done, start: NodesStart) -> int:
    """Return the node that is lost."""
    return start.may_lose[done.fault.rank(len(start.may_lose))]


def _press_ctrl_c(start: Start) -> None:
    """Send SIGINT to the process group in the foreground, as a terminal does."""
    if start.running:
        os.killpg(start.pid, signal.SIGINT)
