"""The processes of a local run: how they are started and ended, and how their reports are read."""

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import IO

from ddp_recipes.launchers.fork_server import ForkedRank, ForkServer, afresh, python_path
from ddp_recipes.launchers.reports import Death, died
from ddp_recipes.launchers.worker import RankReport
from ddp_recipes.runtime.job import Job, Loss
from ddp_recipes.runtime.process import handled_by, is_stopped


@dataclass(eq=False)
class Rank:
    """A process and its reports."""

    number: int
    process: subprocess.Popen[bytes] | ForkedRank
    connection: IO[bytes]  # brings the job; its end is the end of this process
    reports: IO[bytes]
    stacks: IO[bytes]  # where it writes its Python stacks when SIGUSR2 ends it
    joined: bool = False  # whether it has joined the others, since all last met
    began: bool = False  # whether it ever had: then it can save
    report: RankReport | None = None  # at its end
    reported: int = 0  # how many losses it has reported to the user
    loss: Loss | None = None  # why it waits to meet the others again
    hung: bool = False  # whether it was killed because it did not respond
    unread: bytes = b""  # the beginning of a line
    over: bool = False  # whether it has exited, and all that it had sent is read

    @property
    def stopped(self) -> bool:
        """Whether its process runs, but gets no time: SIGSTOP, or a debugger."""
        return self.process.pid is not None and is_stopped(self.process.pid)

    @property
    def lost(self) -> bool:
        """Whether it trains no more, and not because all have come to the end."""
        return self.death is not None or (self.report is not None and self.report.kind == "failed")

    @property
    def why(self) -> str:
        """Why it is lost, in a line."""
        if self.death is not None:
            return self.death.message.splitlines()[0]
        assert self.report is not None
        return f"Rank {self.number} failed: {self.report.message.strip().splitlines()[-1]}"

    def send(self, line: str) -> None:
        """Send the rank a line."""
        with suppress(BrokenPipeError, ValueError):  # it has exited already, which the launcher finds out
            self.connection.write(line.encode() + b"\n")

    def receive(self, line: str) -> None:
        """Take a line that the rank sent."""
        message = json.loads(line)
        if message.get("joined"):
            self.joined = self.began = True
        elif "reported" in message:
            self.reported = message["reported"]
        elif "loss" in message:
            self.loss = Loss(**{**message["loss"], "alone": tuple(message["loss"]["alone"])})
        else:
            self.report = RankReport.from_json(line)

    @property
    def death(self) -> Death | None:
        """How it exited without a report, or ``None``."""
        status = self.process.returncode
        if status is None or self.report is not None or not self.over:
            return None
        if self.hung:
            return Death(self.number, f"Rank {self.number} did not respond and was killed.")
        who = f"process {self.process.pid}" if self.process.pid else "not yet forked"
        return Death(self.number, died(f"Rank {self.number} ({who})", status), asked=status == -signal.SIGTERM)

    def signal_all(self, number: int) -> None:
        """Send a signal to the process and to its data workers, if it is there."""
        if self.process.pid is not None and self.process.poll() is None:
            with suppress(ProcessLookupError):  # it has exited just now, or has no group of its own yet
                os.killpg(self.process.pid, number)

    def show_cursor(self) -> None:
        """Show it on a terminal: the bar of rank 0 hides it while it is there."""
        if self.number == 0 and sys.stdout.isatty():
            print("\n\x1b[?25h", end="", flush=True)

    def end(self) -> None:
        """Kill the process unless it has exited, and restore the terminal after a killed one."""
        self.process.send_signal(signal.SIGKILL)
        if self.process.wait() < 0:
            self.show_cursor()
        for file in (self.connection, self.reports, self.stacks):
            file.close()


SUSPENDS_S = 5.0  # for ranks to come to the end of a step


class Suspension:
    """Ctrl-Z, of which the terminal tells this process alone: its ranks stop before it does, and go on with it.

    Between two steps, if they come to that in time: who waits in a collective counts the time for which all stood.
    """

    def __init__(self) -> None:
        self._requested = False

    def note(self, number: int, frame: FrameType | None) -> None:
        """Take SIGTSTP, or SIGCONT."""
        self._requested = number == signal.SIGTSTP

    def of(self, ranks: Sequence[Rank]) -> float:
        """Stop all, if that was requested, until this process is continued; return for how many seconds they stood."""
        if not self._requested:
            return 0.0
        since = time.monotonic()
        for rank in ranks:
            rank.process.send_signal(signal.SIGTSTP)
        while self._requested and any(rank.process.poll() is None and not rank.stopped for rank in ranks):
            if time.monotonic() > since + SUSPENDS_S:
                break
            time.sleep(0.02)
        if ranks[0].process.returncode is None:
            ranks[0].show_cursor()
        for rank in ranks:
            rank.signal_all(signal.SIGSTOP)
        if self._requested:  # else a scheduler has stopped and continued all meanwhile, and does not continue it again
            os.kill(os.getpid(), signal.SIGSTOP)
        self._requested = False
        for rank in ranks:
            rank.process.send_signal(signal.SIGCONT)  # to one that was forked only now as well
            rank.signal_all(signal.SIGCONT)
        return time.monotonic() - since


@contextmanager
def suspension() -> Iterator[Suspension]:
    """Take Ctrl-Z for a launcher and its ranks, where nothing else takes it."""
    suspended, free = Suspension(), signal.getsignal(signal.SIGTSTP) == signal.SIG_DFL
    with handled_by(dict.fromkeys((signal.SIGTSTP, signal.SIGCONT), suspended.note) if free else {}):
        yield suspended


@dataclass
class Starter:
    """Starts the ranks of a job, from the server if there is one; the stack ends them.

    Attributes:
        first: of the ranks on this node.
        world_size: of the run, where other nodes have ranks of it.
        environ: where ranks of several nodes meet.
        memory: for each rank here the files in which it keeps its state, if it does.
    """

    job: Job
    processes: int
    server: ForkServer | None
    stack: ExitStack
    first: int = 0
    world_size: int | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    memory: Sequence[Sequence[str]] = ()
    _store_file: IO[bytes] | None = None  # the last

    def new_store(self) -> IO[bytes]:
        """Return a file for a store: no port, no path; ranks inherit it, or open it until there is another one."""
        if self._store_file is not None:
            self._store_file.close()
        self._store_file = self.stack.enter_context(os.fdopen(os.memfd_create("ddp_recipes"), "rb"))
        return self._store_file

    def all(self) -> list[Rank]:
        """Start all ranks."""
        store_file = self.new_store() if self.world_size is None else None
        ranks = [self._process(number, store_file) for number in range(self.first, self.first + self.processes)]
        for rank in ranks:
            rank.send(self._of(rank.number, self.job).to_json())
        return ranks

    def one(self, number: int, store_file: IO[bytes], job: Job) -> Rank:
        """Start one in the place of a lost one."""
        rank = self._process(number, store_file)
        rank.send(self._of(number, job).to_json())
        return rank

    def _of(self, number: int, job: Job) -> Job:
        """Return the job as one rank gets it."""
        own = self.memory[number - self.first :][:1]
        return replace(job, memory=own[0]) if own else job

    def _process(self, number: int, store_file: IO[bytes] | None) -> Rank:
        threads = max(1, len(os.sched_getaffinity(0)) // self.processes)
        here = {} if store_file is None else {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        environ = {
            "OMP_NUM_THREADS": str(threads),
            **here,
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # else pages of C++ frames when a peer has exited, which is reported here
            **os.environ,
            "PYTHONPATH": python_path(),
            "RANK": str(number),
            "LOCAL_RANK": str(number - self.first),
            "WORLD_SIZE": str(self.world_size or self.processes),
            "LOCAL_WORLD_SIZE": str(self.processes),
            **self.environ,
        }
        read_end, connection = os.pipe()
        reports, report = os.pipe()
        stacks = self.stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        fds = [read_end, report, stacks.fileno(), *([] if store_file is None else [store_file.fileno()])]
        process = _start_process(fds, environ) if self.server is None else self.server.fork(fds, environ)
        os.close(read_end)
        os.close(report)
        pipes = os.fdopen(connection, "wb", buffering=0), os.fdopen(reports, "rb", buffering=0)
        rank = Rank(number, process, *pipes, stacks)
        self.stack.callback(rank.end)
        return rank


def _start_process(fds: list[int], environ: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        afresh(fds),
        stdin=subprocess.DEVNULL,
        pass_fds=fds,
        env=environ,
        process_group=0,  # Ctrl-C at the terminal reaches this process alone, which then signals the ranks
    )


def incoming(ranks: Sequence[Rank]) -> Iterator[None]:
    """Read what ranks send as it comes; yield each time, and at least ten times a second.

    Exit codes are read before reports: a rank that has one sends no more. Others may take the place of ranks meanwhile.
    """
    with selectors.DefaultSelector() as selector:
        known: list[Rank] = []
        silent: list[Rank] = []  # that have closed their pipe, as one does that exits
        while True:
            for rank in set(known) - set(ranks):  # before another pipe gets the number of its own, which is closed
                known.remove(rank)
                with suppress(KeyError, ValueError):
                    selector.unregister(rank.reports)
            for rank in ranks:
                rank.process.poll()  # which may find that the process that all are forked from is lost, with all
            exited = [rank for rank in ranks if not rank.over and rank.process.returncode is not None]
            for rank in ranks:
                if rank not in known:
                    known.append(rank)
                    selector.register(rank.reports, selectors.EVENT_READ, rank)
            about_to = any(rank in ranks and not rank.over for rank in silent)
            seconds = 0.0 if exited else 0.01 if about_to else 0.1
            for chosen, _ in selector.select(seconds) if selector.get_map() else ():
                rank = chosen.data
                if rank not in ranks:  # another one has taken its place since, and its pipe is closed
                    continue
                text = rank.reports.read(1 << 20)
                *lines, rank.unread = (rank.unread + text).split(b"\n")
                for line in map(bytes.decode, lines):
                    rank.receive(line)
                    yield
                if not text:
                    selector.unregister(rank.reports)
                    silent.append(rank)
            for rank in exited:
                rank.over = True
            if not selector.get_map():
                time.sleep(0.01)
            yield
