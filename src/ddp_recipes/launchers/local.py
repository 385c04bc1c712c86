"""Starts one process a replica on this machine, and sees to it that none is left."""

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import IO, Any

from ddp_recipes.errors import Preempted, RequestError, RunFailed, not_arrived
from ddp_recipes.launchers import stacks
from ddp_recipes.launchers.fork_server import ForkedRank, ForkServer, python_path
from ddp_recipes.reporting.run_directory import Summary, leave_failure, leave_trace
from ddp_recipes.runtime.job import ASKS_TO_STOP, Job
from ddp_recipes.runtime.process import ignore_once, is_stopped, loading

AFTER_FAILURE_S = 3.0  # for the other ranks to end by themselves, and for rank 0 to write its summary
AFTER_INTERRUPT_S = 6.0  # for a checkpoint after Ctrl-C
AFTER_TERM_S = 25.0  # for a checkpoint after SIGTERM or SIGUSR1, within a scheduler's usual 30 s


@dataclass
class _Interrupts:
    """Signals that this process got, in order."""

    names: list[str] = field(default_factory=list)


def launch(job: Job, processes: int, server: ForkServer | None, max_restarts: int = 0) -> Summary:
    """Run a job in so many processes, or in this one if it is one and is not to be restarted.

    Args:
        server: what forks the processes; without one each is started afresh.
        max_restarts: how often all ranks are started again, from the last checkpoint, after one of them failed.

    Returns:
        Rank 0's summary.

    Raises:
        RequestError, Preempted: as the ranks say.
        RunFailed: a rank raised or died; its traceback is the message.
        KeyboardInterrupt: interrupted twice, or before there was anything to save.
    """
    if processes > 1 or max_restarts:
        with _signals_caught(job.last) as interrupts:
            for attempt in range(max_restarts):
                try:
                    return _launch_once(job, processes, server, interrupts)
                except RunFailed as error:
                    if interrupts.names:  # it was to end anyway
                        raise
                    print(
                        f"{error}\nRestart {attempt + 1} of {max_restarts}, from the last checkpoint.",
                        file=sys.stderr,
                        flush=True,
                    )
                    job = job.resumed()
            return _launch_once(job, processes, server, interrupts)
    if server is not None:
        server.close()
    with loading():
        from ddp_recipes import rank
    from ddp_recipes.runtime.world import World

    return rank.run(job, World(), None)


def _launch_once(job: Job, processes: int, server: ForkServer | None, interrupts: _Interrupts) -> Summary:
    """Start the ranks and wait for them."""
    with ExitStack() as stack:
        ranks = _start(job, processes, server, stack)
        return _supervise(job, ranks, interrupts)


@dataclass
class _Rank:
    """A process and what it said last."""

    number: int
    process: subprocess.Popen[bytes] | ForkedRank
    lifeline: IO[bytes]  # brings the job; its end is the end of this process
    reports: IO[bytes]
    stacks: IO[bytes]  # where it writes its Python stacks when asked to by SIGUSR2
    place: str = ""  # where it said it was while it started
    said: dict[str, Any] = field(default_factory=dict)  # at its end

    @property
    def died(self) -> str | None:
        """How it ended without a word, or ``None``."""
        status = self.process.returncode
        if status is None or self.said:
            return None
        return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"


def _start(job: Job, processes: int, server: ForkServer | None, stack: ExitStack) -> list[_Rank]:
    """Start the ranks and give each the job."""
    listener = stack.enter_context(socket.socket())
    listener.bind(("127.0.0.1", 0))  # a free port, on loopback only; rank 0 gets the socket, so nobody can take it
    port = listener.getsockname()[1]
    threads = max(1, len(os.sched_getaffinity(0)) // processes)
    ranks = []
    for number in range(processes):
        environ = {
            "OMP_NUM_THREADS": str(threads),
            "GLOO_SOCKET_IFNAME": "lo",
            "NCCL_SOCKET_IFNAME": "lo",
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # else pages of C++ frames when a peer is gone, which is said here
            **os.environ,
            "PYTHONPATH": python_path(),
            **{name: str(number) for name in ("RANK", "LOCAL_RANK")},
            **{name: str(processes) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")},
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        life, lifeline = os.pipe()
        reports, report = os.pipe()
        trace = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        fds = [life, report, trace.fileno(), *([listener.fileno()] if number == 0 else [])]
        process = _start_process(server, fds, environ)
        os.close(life)
        os.close(report)
        rank = _Rank(
            number, process, os.fdopen(lifeline, "wb", buffering=0), os.fdopen(reports, "rb", buffering=0), trace
        )
        stack.callback(_end, rank)
        ranks.append(rank)
    for rank in ranks:
        with suppress(BrokenPipeError):  # it is gone already, which is found out by the one who watches
            rank.lifeline.write(job.to_json().encode() + b"\n")
    return ranks


def _start_process(
    server: ForkServer | None, fds: list[int], environ: dict[str, str]
) -> subprocess.Popen[bytes] | ForkedRank:
    if server is not None:
        return server.fork(fds, environ, threads=int(environ["OMP_NUM_THREADS"]))
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "ddp_recipes.launchers.worker", *map(str, fds)],
        stdin=subprocess.DEVNULL,
        pass_fds=fds,
        env=environ,
        process_group=0,  # Ctrl-C at the terminal reaches this process alone, which then tells the ranks
    )


def _end(rank: _Rank) -> None:
    """Make sure that a rank is gone, and that the terminal is not left as a killed one had it."""
    if rank.process.poll() is None:
        rank.process.kill()
    if rank.process.wait() < 0 and rank.number == 0 and sys.stdout.isatty():
        print("\n\x1b[?25h", end="", flush=True)  # the bar hides the cursor while it is there
    rank.lifeline.close()
    rank.reports.close()


def _supervise(job: Job, ranks: list[_Rank], interrupts: _Interrupts) -> Summary:
    """Wait for the ranks, pass signals on, and end them all if one of them fails."""
    deadline: float | None = None
    passed_on = 0
    timeout_s = float(job.config["launcher"]["timeout_s"])
    late = float("inf")  # when all ranks have to be inside the store
    for rank in _reports(ranks):
        if rank is not None and rank.place:
            late = min(late, time.monotonic() + timeout_s)
        if time.monotonic() > late and (missing := _missing(ranks)):
            _keep_stacks(job, ranks)
            message = not_arrived(missing, len(ranks), timeout_s)
            leave_failure(job.directory, job.overrides, message)
            raise RunFailed(message, silent=missing)
        if interrupts.names.count("SIGINT") > 1:
            leave_failure(job.directory, job.overrides, "interrupted by the keyboard, twice")
            raise KeyboardInterrupt
        if len(interrupts.names) > passed_on:
            if not passed_on:
                deadline = time.monotonic() + (AFTER_INTERRUPT_S if interrupts.names[0] == "SIGINT" else AFTER_TERM_S)
                for rank in ranks:
                    _tell(rank, signal.SIGTERM)
            passed_on = len(interrupts.names)
        failed = any(rank.died or rank.said.get("kind", "summary") != "summary" for rank in ranks)
        if failed and deadline is None:
            deadline = time.monotonic() + AFTER_FAILURE_S
        silent = {number for rank in ranks for number in rank.said.get("silent", ())}  # there is no waiting for them
        awaited = [rank for rank in ranks if rank.process.returncode is None and rank.number not in silent]
        if not awaited or (deadline and time.monotonic() > deadline):
            break
    _keep_stacks(job, ranks)
    return _outcome(job, ranks, interrupts)


def _keep_stacks(job: Job, ranks: list[_Rank]) -> None:
    """Write to ``ranks/`` where the ranks that are about to be killed stand."""
    stuck = {
        rank.process.pid: rank
        for rank in ranks
        if rank.process.poll() is None and not rank.said and rank.process.pid is not None
    }
    for pid, text in stacks.ask({pid: rank.stacks for pid, rank in stuck.items()}).items():
        leave_trace(job.directory, stuck[pid].number, text)


def _missing(ranks: list[_Rank]) -> list[int]:
    """Return the ranks that others wait for at the start: stopped ones, those that never came, or the store's."""
    outside = [rank.number for rank in ranks if rank.place != "inside" and not rank.said]
    if outside and (stopped := [rank.number for rank in ranks if rank.process.pid and is_stopped(rank.process.pid)]):
        return stopped
    if never_came := [number for number in outside if not ranks[number].place]:
        return never_came
    # Rank 0 holds the store: where nobody else comes in, it is rank 0 that does not answer.
    return [0] if 0 in outside or len(outside) == len(ranks) - 1 > 0 else outside


def _tell(rank: _Rank, number: int) -> None:
    if rank.process.poll() is None:
        rank.process.send_signal(number)


def _reports(ranks: list[_Rank]) -> Iterator[_Rank | None]:
    """Take in what ranks report as it comes; yield who did, and ``None`` at least ten times a second.

    Return codes are looked at before reports: a rank that has one has said all that it ever will.
    """
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            selector.register(rank.reports, selectors.EVENT_READ, rank)
        texts = {rank.number: b"" for rank in ranks}
        while True:
            for rank in ranks:
                rank.process.poll()
            for chosen, _ in selector.select(timeout=0.1) if selector.get_map() else ():
                rank = chosen.data
                text = rank.reports.read(1 << 20)
                *lines, texts[rank.number] = (texts[rank.number] + text).split(b"\n")
                for said in map(json.loads, lines):
                    rank.place = said.get("place", rank.place)
                    rank.said = said if "kind" in said else rank.said
                    yield rank
                if not text:
                    selector.unregister(rank.reports)
            if not selector.get_map():
                time.sleep(0.01)
            yield None


def _outcome(job: Job, ranks: list[_Rank], interrupts: _Interrupts) -> Summary:
    """Return rank 0's summary, or raise the one thing that ended the run."""
    said = {
        kind: [rank for rank in ranks if rank.said.get("kind") == kind] for kind in ("refused", "preempted", "failed")
    }
    died = [rank for rank in ranks if rank.died]
    if said["refused"]:
        raise RequestError(said["refused"][0].said["message"])
    if interrupts.names and not said["failed"] and not said["preempted"] and (died or not _all_done(ranks)):
        leave_failure(job.directory, job.overrides, f"stopped by {interrupts.names[0]} before a checkpoint was saved")
        raise KeyboardInterrupt
    if said["preempted"] and not died:
        words = said["preempted"][0].said
        if interrupts.names:  # ranks are told by SIGTERM, which asks for the same
            told = interrupts.names[0].replace("SIGINT", "Ctrl-C")
            words["message"] = words["message"].replace("SIGTERM", told, 1)
        raise Preempted(words["message"], checkpoint=words["checkpoint"])
    if died:
        rank = died[0]
        message = f"Rank {rank.number} (process {rank.process.pid}) {rank.died}, without a traceback."
        leave_failure(job.directory, job.overrides, message, known_better=True)
        raise RunFailed(message, rank=rank.number)
    silent = [str(rank.number) for rank in ranks if not rank.said]
    killed = f"Rank {', '.join(silent)} did not answer any more and was killed."
    if said["failed"]:
        first = min(said["failed"], key=lambda rank: (not rank.said["cause"], rank.said["time"]))
        error = f"rank {first.number}: {first.said['message'].strip().splitlines()[-1]}"
        message = f"Rank {first.number} failed:\n{first.said['message'].rstrip()}"
        if silent and "did not answer" not in message:  # rank 0 held the store, or the backend aborted
            error, message = f"{error} {killed}", f"{message}\n{killed}"
        leave_failure(job.directory, job.overrides, error, known_better=bool(silent))
        raise RunFailed(message, rank=first.number)
    if silent:
        leave_failure(job.directory, job.overrides, killed)
        raise RunFailed(killed, rank=int(silent[0]))
    summary: Summary = ranks[0].said["summary"]
    return summary


def _all_done(ranks: list[_Rank]) -> bool:
    return all(rank.said.get("kind") == "summary" for rank in ranks)


@contextmanager
def _signals_caught(last: bool) -> Iterator[_Interrupts]:
    """Collect SIGINT, SIGTERM and SIGUSR1 instead of dying of them; in the main thread only.

    Args:
        last: whether this process leaves after what is done meanwhile.
    """
    caught = _Interrupts()

    def note(number: int, frame: FrameType | None) -> None:
        caught.names.append(signal.Signals(number).name)

    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    former = {number: signal.signal(number, note) for number in ASKS_TO_STOP}
    try:
        yield caught
    finally:
        if last:
            ignore_once(ASKS_TO_STOP)
        else:
            for number, handler in former.items():
                signal.signal(number, handler)
