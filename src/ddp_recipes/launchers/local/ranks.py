"""The processes of a local run: how they are started and ended, and how their reports are read."""

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import IO

from ddp_recipes.launchers.fork_server import ForkedRank, ForkServer, python_path
from ddp_recipes.launchers.reports import Death, RankReport
from ddp_recipes.runtime.job import Job


@dataclass
class Rank:
    """A process and its reports."""

    number: int
    process: subprocess.Popen[bytes] | ForkedRank
    lifeline: IO[bytes]  # brings the job; its end is the end of this process
    reports: IO[bytes]
    stacks: IO[bytes]  # where it writes its Python stacks when SIGUSR2 ends it
    joined: bool = False  # whether it has joined the others
    report: RankReport | None = None  # at its end

    @property
    def death(self) -> Death | None:
        """How it exited without a report, or ``None``."""
        status = self.process.returncode
        if status is None or self.report is not None:
            return None
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with exit code {status}"
        message = f"Rank {self.number} (process {self.process.pid}) {how}, without a traceback."
        if status == -signal.SIGKILL:
            message += "\nIf nobody killed it, memory ran out (dmesg shows it): lower data.batch_size or num_workers."
        return Death(self.number, message)

    def end(self) -> None:
        """Kill the process unless it has exited, and restore the terminal after a killed one."""
        self.process.send_signal(signal.SIGKILL)
        if self.process.wait() < 0 and self.number == 0 and sys.stdout.isatty():
            print("\n\x1b[?25h", end="", flush=True)  # the bar hides the cursor while it is there
        self.lifeline.close()
        self.reports.close()


def start(job: Job, processes: int, server: ForkServer | None, stack: ExitStack) -> list[Rank]:
    """Start the ranks and give each the job; the stack ends them."""
    text = job.to_json().encode() + b"\n"
    meeting = stack.enter_context(os.fdopen(os.memfd_create("ddp_recipes")))  # no port, no path: ranks inherit it
    threads = max(1, len(os.sched_getaffinity(0)) // processes)
    ranks = []
    for number in range(processes):
        environ = {
            "OMP_NUM_THREADS": str(threads),
            "GLOO_SOCKET_IFNAME": "lo",
            "NCCL_SOCKET_IFNAME": "lo",
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # else pages of C++ frames when a peer has exited, which is reported here
            **os.environ,
            "PYTHONPATH": python_path(),
            **{name: str(number) for name in ("RANK", "LOCAL_RANK")},
            **{name: str(processes) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")},
        }
        life, lifeline = os.pipe()
        reports, report = os.pipe()
        stacks = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        fds = [life, report, stacks.fileno(), meeting.fileno()]
        process = _start_process(fds, environ) if server is None else server.fork(fds, environ)
        os.close(life)
        os.close(report)
        pipes = os.fdopen(lifeline, "wb", buffering=0), os.fdopen(reports, "rb", buffering=0)
        rank = Rank(number, process, *pipes, stacks)
        stack.callback(rank.end)
        ranks.append(rank)
    for rank in ranks:
        with suppress(BrokenPipeError):  # it has exited already, which the launcher finds out
            rank.lifeline.write(text)
    return ranks


def _start_process(fds: list[int], environ: dict[str, str]) -> subprocess.Popen[bytes]:
    arguments = ", ".join(map(str, fds))
    return subprocess.Popen(
        [sys.executable, "-P", "-c", f"from ddp_recipes.launchers.worker import work; work({arguments})"],
        stdin=subprocess.DEVNULL,
        pass_fds=fds,
        env=environ,
        process_group=0,  # Ctrl-C at the terminal reaches this process alone, which then signals the ranks
    )


def incoming(ranks: Sequence[Rank]) -> Iterator[None]:
    """Read reports as they come; yield each time, and at least ten times a second.

    Exit codes are read before reports: a rank that has one sends no more.
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
                for line in map(bytes.decode, lines):
                    if json.loads(line).get("joined"):
                        rank.joined = True
                    else:
                        rank.report = RankReport.from_json(line)
                    yield
                if not text:
                    selector.unregister(rank.reports)
            if not selector.get_map():
                time.sleep(0.01)
            yield
