"""Keeps states of a node's ranks in memory for torchrun's next start: in a process beside them. Loads no torch."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_recipes.launchers.fork_server import python_path
from ddp_recipes.recovery.memory import SnapshotSlots
from ddp_recipes.recovery.source import ahead_s, clock_of_nodes, moment
from ddp_recipes.runtime.process import is_running, started_at

RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE")  # a holder is none, though a rank starts it


@dataclass(frozen=True)
class SnapshotHolder:
    """A process that holds memory, which the ranks write and read, until torchrun ends.

    Attributes:
        process: its id.
        born: when it started; by now another process may have the id.
        paths: of each part of the model two files.
        ranks: pipe for the ids of ranks to watch.
        loss: file with the time at which the first of these ended.
        ahead: how many seconds its clock, that of the run, is ahead of the machine's own.
    """

    process: int
    born: int
    paths: tuple[tuple[str, str], ...]
    ranks: str
    loss: str
    ahead: float

    @classmethod
    def started(cls, parts: int) -> "SnapshotHolder":
        """Start one that ends with this process's parent, which is torchrun."""
        environ = {name: value for name, value in os.environ.items() if name not in RANK}
        torchrun = os.pidfd_open(os.getppid())
        try:
            code = f"from ddp_recipes.recovery.snapshot_holder import hold; hold({torchrun}, {parts})"
            found = subprocess.run(
                [sys.executable, "-P", "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                pass_fds=[torchrun],
                env={**environ, "PYTHONPATH": python_path()},
                start_new_session=True,  # torchrun ends each rank's whole group
                check=True,
            )
        finally:
            os.close(torchrun)
        return cls.of(json.loads(found.stdout))

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "SnapshotHolder":
        """Return the holder whose fields came as JSON."""
        return cls(**{**values, "paths": tuple(map(tuple, values["paths"]))})

    @property
    def lives(self) -> bool:
        """Whether it is still there."""
        with suppress(OSError):
            return started_at(self.process) == self.born and is_running(self.process)
        return False

    @property
    def lost_at(self) -> float:
        """The :func:`moment` at which the first of the ranks that it watched ended."""
        return float(Path(self.loss).read_text() or time.monotonic() + self.ahead)

    def watch(self) -> None:
        """Have it note when this process ends."""
        with open(self.ranks, "wb", buffering=0) as pipe:
            pipe.write(f"{os.getpid()}\n".encode())

    def end(self) -> None:
        """End it, and what it holds."""
        with suppress(ProcessLookupError):
            os.kill(self.process, signal.SIGKILL)


def hold(torchrun: int, parts: int) -> None:
    """Be a holder: leave the process that started this one, print the fields as JSON, and wait for torchrun's end.

    Args:
        torchrun: file descriptor of the process.
        parts: of the model.
    """
    if os.fork():
        return
    with ExitStack() as stack:
        slots = SnapshotSlots.made(parts, stack)
        loss = stack.enter_context(os.fdopen(os.memfd_create("ddp_recipes"), "wb", buffering=0))
        reader, writer = os.pipe()
        own, files = os.getpid(), f"/proc/{os.getpid()}/fd"
        stack.enter_context(clock_of_nodes())
        fields = {"process": own, "born": started_at(own), "paths": slots.paths, "ahead": ahead_s()}
        print(json.dumps({**fields, "ranks": f"{files}/{writer}", "loss": f"{files}/{loss.fileno()}"}), flush=True)
        null = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(null, stream)  # torchrun, or who reads what it prints, may wait until nobody has the others
        os.chdir("/")
        poll = select.poll()
        for fd in (torchrun, reader):
            poll.register(fd, select.POLLIN)
        while torchrun not in (ready := [fd for fd, _ in poll.poll()]):
            for fd in ready:
                if fd == reader:
                    loss.seek(0)
                    loss.truncate()  # of an earlier start
                    for process in os.read(reader, 1 << 16).split():
                        with suppress(ProcessLookupError):
                            poll.register(os.pidfd_open(int(process)), select.POLLIN)
                else:
                    poll.unregister(fd)
                    os.close(fd)
                    if not loss.tell():
                        loss.write(str(moment()).encode())
