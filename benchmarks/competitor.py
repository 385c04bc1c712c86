"""One competitor: its processes, the terminal they print to, and what it says of its turns."""

import json
import os
import pty
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Any

from benchmarks.player import Seat
from benchmarks.samples import python_path


@dataclass(frozen=True)
class Turn:
    """What came of a turn.

    Attributes:
        seconds: of its slowest rank.
        cpu_seconds: processor time of rank 0: what remains of ``seconds`` where others disturb.
        stall: the longest step less the median one, on rank 0.
        at: when the last rank had done its last step, by the clock that all processes share.
        level: rank 0's loss on a fixed set of samples afterwards.
        peak: most memory of a rank so far, in bytes.
        rank0: all that rank 0 reported.
    """

    steps: int
    seconds: float
    cpu_seconds: float
    stall: float
    at: float
    level: float | None
    peak: int
    rank0: Mapping[str, Any]


class Failed(Exception):
    """A competitor ended or went silent."""


@dataclass
class Competitor:
    """A running :class:`Entry`."""

    seat: Seat
    command: Sequence[str]
    joins: bool
    started: float = 0.0
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    channels: dict[int, IO[str]] = field(default_factory=dict)
    printed: bytearray = field(default_factory=bytearray)

    def start(self) -> None:
        """Start its processes, on a terminal: bars are drawn as they would be for a person."""
        terminal, theirs = pty.openpty()
        threading.Thread(target=self._read, args=[terminal], daemon=True).start()
        self.started = time.monotonic()
        for environ in self._environs():
            self.processes.append(
                subprocess.Popen(
                    self.command,
                    stdin=subprocess.DEVNULL,
                    stdout=theirs,
                    stderr=theirs,
                    env=environ,
                    cwd=self.seat.directory,
                    process_group=0,  # not a session: Linux shares the processor out among sessions
                )
            )
        os.close(theirs)

    def _environs(self) -> list[dict[str, str]]:
        common = {**os.environ, **self.seat.environ(), "PYTHONPATH": python_path(), "TERM": "xterm", "COLUMNS": "120"}
        common |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        if not self.joins or self.seat.ranks == 1:
            return [common]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        size = str(self.seat.ranks)
        common |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        common |= {"TORCHELASTIC_RUN_ID": "none"}  # how Lightning knows torchrun
        return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(self.seat.ranks)]

    def _read(self, terminal: int) -> None:
        with suppress(OSError):  # how a terminal ends
            while text := os.read(terminal, 1 << 16):
                self.printed += text
                del self.printed[: -(1 << 14)]
        os.close(terminal)

    def begin(self, steps: int) -> None:
        """Give it the turn."""
        for rank in self.channels:
            self._tell(rank, steps)

    def turn(self, steps: int) -> Turn:
        """Let it take so many steps."""
        self.begin(steps)
        return self.outcome()

    def outcome(self) -> Turn:
        """Wait for the end of its turn."""
        reports = [self._hear(rank) for rank in sorted(self.channels)]
        first = reports[0]
        return Turn(
            steps=first["steps"],
            seconds=max(report["seconds"] for report in reports),
            cpu_seconds=first["cpu_seconds"],
            stall=first["stall"],
            at=max(report["at"] for report in reports),
            level=first["level"],
            peak=max(report["peak"] for report in reports),
            rank0=first,
        )

    def _tell(self, rank: int, steps: int) -> None:
        with suppress(BrokenPipeError):  # it is gone, which is found out by listening
            self.channels[rank].write(json.dumps({"steps": steps}) + "\n")
            self.channels[rank].flush()

    def _hear(self, rank: int) -> dict[str, Any]:
        try:
            line = self.channels[rank].readline()
        except (TimeoutError, ConnectionError):
            line = ""
        if not line:
            raise Failed(f"{self.seat.name}: rank {rank} did not finish its turn.\n{self.last_words()}")
        report: dict[str, Any] = json.loads(line)
        return report

    def last_words(self) -> str:
        """Return the end of what it printed."""
        return self.printed.decode(errors="replace")[-4000:].replace("\r", "\n")

    def stop(self) -> None:
        """End it, as it waits for its turn: to leave by itself takes torch a second. Ranks of its own end with their
        channel."""
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        for channel in self.channels.values():
            with suppress(BrokenPipeError):
                channel.close()
