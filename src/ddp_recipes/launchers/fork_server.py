"""Forks ranks from a process that loads torch while the config is still being composed.

Loading torch and its compiler takes seconds. Here it is paid once, for all local ranks and all jobs of a sweep. Only
torch and this package are loaded, nothing of a user's, and no CUDA context is made: a fork does not survive one.

Why not :mod:`multiprocessing.forkserver`, which forks as quickly: each of its ranks holds the pipe whose end ends the
server, so a stopped rank, and the server, outlive a killed controller; it runs the user's main module again in every
rank, which fails for a script without ``if __name__ == "__main__"``; a SIGTERM to the whole job ends it, and the ranks
before they have saved; starting a rank waits for it without a timeout; and nothing public ends it when a run has ended.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from ddp_recipes.launchers import forking
from ddp_recipes.launchers.reports import died
from ddp_recipes.runtime.process import is_running, is_stopped

WAIT_S = 2.0  # for the report that a rank has exited, of a server that is stopped
LOAD_S = 1800.0  # of one that runs; also to load torch, and to fork


class ForkedRank:
    """A process that the server forks, as :class:`subprocess.Popen` would show it.

    Attributes:
        pid: ``None`` until the server has forked it.
        returncode: as in ``Popen``: negative for a signal, ``None`` while it runs.
    """

    def __init__(self, server: "ForkServer", number: int) -> None:
        self._server = server
        self._number = number
        self.pid: int | None = None
        self.returncode: int | None = None
        self._since = time.monotonic()  # when the server was asked for it, or it was last seen to run

    def poll(self) -> int | None:
        """Return the exit code if it has exited; a server that does not report that, or not fork it, is killed."""
        self._server.listen(0)
        if self.returncode is None and self._overdue():
            self._server.give_up()
        return self.returncode

    def _overdue(self) -> bool:
        now = time.monotonic()
        if self.pid is not None and is_running(self.pid):
            self._since = now
        return now > self._since + (WAIT_S if self._server.stopped else LOAD_S)

    def send_signal(self, number: int) -> None:
        """Send a signal unless it has exited; one that is not yet forked gets it then."""
        if self.poll() is None:
            self._server.send(["signal", self._number, number])

    def wait(self) -> int:
        """Return the exit code of a process that was killed; a server that does not respond is killed with it."""
        while self.returncode is None and self._server.listen(WAIT_S):
            pass
        if self.returncode is None:
            self._server.close()
        assert self.returncode is not None
        return self.returncode


class ForkServer:
    """The controller's side of the server, which exits with the controller. Loads no torch; a copy by pickle is new."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._ranks: list[ForkedRank] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return ForkServer, ()

    def start(self) -> None:
        """Start loading, and return at once."""
        if self._process is not None:
            return
        self._channel, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)  # a message a packet
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-c",
                    f"from {forking.__name__} import main; main({theirs.fileno()})",
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={"TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ, "PYTHONPATH": python_path()},
                process_group=0,  # Ctrl-C at the terminal is not for it
            )

    def fork(self, arguments: Sequence[int], environ: Mapping[str, str]) -> ForkedRank:
        """Request a rank with this environment; return at once.

        Args:
            arguments: file descriptors, as :mod:`ddp_recipes.launchers.worker` takes them.
        """
        self.start()
        number = len(self._ranks)
        self._ranks.append(ForkedRank(self, number))
        with os.fdopen(os.memfd_create("request"), "w") as file:  # an environment may be larger than a packet
            json.dump({"environ": dict(environ), "path": sys.path, "folder": os.getcwd()}, file)
            file.flush()
            self.send(["fork", number, 0], [file.fileno(), 1, 2, *arguments])
        return self._ranks[number]

    def send(self, message: list[Any], fds: Sequence[int] = ()) -> None:
        """Send a message; that the server has exited is found by :meth:`listen`."""
        if self._channel is not None:
            with suppress(BrokenPipeError, ConnectionResetError):
                socket.send_fds(self._channel, [json.dumps(message).encode()], fds)

    def listen(self, seconds: float) -> bool:
        """Receive what the server has reported; wait so long for the first report. Return whether there was one."""
        received = False
        while self._channel is not None and select.select([self._channel], [], [], 0 if received else seconds)[0]:
            received = True
            try:
                message = self._channel.recv(forking.MAX_BYTES)
            except ConnectionResetError:  # it was killed before it had read all
                message = b""
            if not message:
                self._report_exit()
                break
            what, number, value = json.loads(message)
            if what == "forked":
                self._ranks[number].pid = value
            else:
                self._ranks[number].returncode = value
        return received

    def _report_exit(self) -> None:
        """Say how the server exited, by itself: its ranks have died with it."""
        process = self._process
        self.close()
        assert process is not None
        how = died(f"The process that ranks are forked from (process {process.pid})", process.returncode)
        print(how, file=sys.stderr, flush=True)

    @property
    def stopped(self) -> bool:
        """Whether it gets no time: SIGSTOP, or a debugger."""
        return self._process is not None and is_stopped(self._process.pid)

    def give_up(self) -> None:
        """End a server that does not respond, stopped or stuck."""
        print("The process that ranks are forked from did not respond and was killed, with all ranks.", file=sys.stderr)
        self.close()

    def close(self) -> None:
        """End the server, and with it the ranks that still run."""
        if self._process is None or self._channel is None:
            return
        self._channel.close()
        self._process.kill()  # its ranks die with it
        self._process.wait()
        self._channel = self._process = None
        for rank in self._ranks:
            if rank.returncode is None:
                rank.returncode = -signal.SIGKILL
        self._ranks.clear()


def python_path() -> str:
    """Return this process's import path as ``PYTHONPATH``."""
    return os.pathsep.join(path or os.getcwd() for path in sys.path)


def afresh(arguments: Sequence[int]) -> list[str]:
    """Return the command of a rank that loads all by itself."""
    work = f"from ddp_recipes.launchers.worker import work; work({', '.join(map(str, arguments))})"
    return [sys.executable, "-P", "-c", work]
