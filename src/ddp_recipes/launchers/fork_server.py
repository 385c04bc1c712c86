"""Starts ranks by fork from a process that has loaded torch already, while the config was still being composed.

Loading torch and its compiler takes seconds a process. Here it is paid once: beside the composition, not after it, for
all local ranks together, and for all jobs of a sweep. Only torch and this package are loaded, nothing of a user's, and
no CUDA context is made: a fork does not survive one.
"""

import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from ddp_recipes.runtime.job import ASKS_TO_STOP
from ddp_recipes.runtime.process import die_with_parent, ignore, loading

WAIT_S = 2.0  # for the word that a killed rank is gone
MAX_FDS = 8


class ForkedRank:
    """A process that the server forked, as :class:`subprocess.Popen` would show it.

    Attributes:
        pid: ``None`` until the server has got to it.
        returncode: as in ``Popen``: negative for a signal, ``None`` while it runs.
    """

    def __init__(self, server: "ForkServer") -> None:
        self._server = server
        self._early: list[int] = []  # signals sent before there was a process
        self.pid: int | None = None
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status if it has ended."""
        self._server.listen(0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal unless it has ended."""
        if self.poll() is not None:
            return
        if self.pid is None:
            self._early.append(number)
        else:
            _signal(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)

    def wait(self) -> int:
        """Return the exit status of a process that was told to end; a server that does not answer goes with it."""
        if self.returncode is None and self.pid is not None:
            self._server.listen(WAIT_S, until=self)
        if self.returncode is None:
            self._server.close()
        assert self.returncode is not None
        return self.returncode

    def started(self, pid: int) -> None:
        """Take note of the process, and hand on what was meant for it."""
        self.pid = pid
        for number in self._early:
            _signal(pid, number)


class ForkServer:
    """The process that forks, from the side of the one that has it fork; loads no torch. It ends with that process.

    A pickled one is a new one: it belongs to the process that made it.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._unread = b""
        self._ranks: list[ForkedRank] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return ForkServer, ()

    def start(self) -> None:
        """Start loading, and return at once."""
        if self._process is not None:
            return
        self._channel, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={"TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ, "PYTHONPATH": python_path()},
                process_group=0,  # Ctrl-C at the terminal is not for it
            )

    def fork(self, arguments: Sequence[int], environ: Mapping[str, str], threads: int) -> ForkedRank:
        """Ask for a rank.

        Args:
            arguments: file descriptors, as :mod:`ddp_recipes.launchers.worker` takes them.
            environ: its environment.
            threads: CPU threads that torch computes with.
        """
        self.start()
        assert self._channel is not None
        rank = ForkedRank(self)
        self._ranks.append(rank)
        request = {
            "number": len(self._ranks) - 1,
            "environ": dict(environ),
            "path": sys.path,
            "folder": os.getcwd(),
            "threads": threads,
        }
        text = json.dumps(request).encode()
        with suppress(BrokenPipeError):  # the server is gone, which poll() finds out
            socket.send_fds(self._channel, [len(text).to_bytes(8, "big")], [1, 2, *arguments])
            self._channel.sendall(text)
        return rank

    def listen(self, seconds: float, until: ForkedRank | None = None) -> None:
        """Take in what the server said; wait for more until ``until`` has ended, at most so long."""
        while self._channel is not None and (until is None or until.returncode is None):
            ready, _, _ = select.select([self._channel], [], [], seconds)
            if not ready:
                return
            try:
                text = self._channel.recv(1 << 16)
            except ConnectionResetError:  # it was killed before it read all that it was asked
                text = b""
            if not text:
                self.close()
                return
            *lines, self._unread = (self._unread + text).split(b"\n")
            for line in lines:
                number, word, value = json.loads(line)
                if word == "started":
                    self._ranks[number].started(value)
                else:
                    self._ranks[number].returncode = value

    def close(self) -> None:
        """End the server, and with it the ranks that are left."""
        if self._process is None or self._channel is None:
            return
        self._channel.close()
        self._channel = None
        self._process.kill()  # its ranks have asked to die with it
        self._process.wait()
        self._process = None
        for rank in self._ranks:
            if rank.returncode is None:
                rank.returncode = -signal.SIGKILL
        self._ranks.clear()
        self._unread = b""


def python_path() -> str:
    """Return this process's import path as ``PYTHONPATH``."""
    return os.pathsep.join(path or os.getcwd() for path in sys.path)


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):  # it has just ended, and that word is on its way
        os.kill(pid, number)


def main() -> None:
    """Load what every rank needs, then fork whenever asked."""
    die_with_parent()
    ignore(ASKS_TO_STOP)  # a whole cgroup or job may be told: the ranks have yet to save
    channel = socket.socket(fileno=int(sys.argv[1]))
    if select.select([channel], [], [], 0)[0] and not channel.recv(1, socket.MSG_PEEK):
        return  # the parent died before it was asked about
    with suppress(Exception), loading():  # each rank meets the same error, and reports it
        import ddp_recipes.rank  # noqa: F401
        from ddp_recipes._compat.ddp import load_what_ddp_needs

        load_what_ddp_needs()
    gc.freeze()  # so that collections in the ranks do not copy all these pages
    serve(channel)


def serve(channel: socket.socket) -> None:
    """Fork a rank for each request, and say when one has ended, until the channel closes."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    numbers: dict[int, int] = {}  # process -> number of the request
    while True:
        ready = select.select([channel.fileno(), woken], [], [])[0]
        if woken in ready:
            os.read(woken, 1 << 10)
            while numbers:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                _say(channel, numbers.pop(pid), "ended", os.waitstatus_to_exitcode(status))
        if channel.fileno() in ready:
            received = _receive(channel)
            if received is None:
                return
            request, fds = received
            with warnings.catch_warnings():
                # Python >= 3.12 warns of a fork while there are threads: NumPy's are idle, and made for it.
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
            if pid == 0:
                _become_rank(request, fds, [channel.fileno(), woken, wake])
            for fd in fds:
                os.close(fd)
            numbers[pid] = request["number"]
            _say(channel, request["number"], "started", pid)


def _say(channel: socket.socket, number: int, word: str, value: int) -> None:
    with suppress(BrokenPipeError):
        channel.sendall(json.dumps([number, word, value]).encode() + b"\n")


def _receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Return a request and the file descriptors that came with it, or ``None`` at the end."""
    head, fds, _, _ = socket.recv_fds(channel, 8, MAX_FDS)
    if not head:
        return None
    while len(head) < 8:
        head += channel.recv(8 - len(head))
    length, text = int.from_bytes(head, "big"), b""
    while len(text) < length:
        text += channel.recv(length - len(text))
    request: dict[str, Any] = json.loads(text)
    return request, fds


def _become_rank(request: dict[str, Any], fds: list[int], others: list[int]) -> NoReturn:
    """Turn this fork into what a process started for the rank alone would be, and run it."""
    signal.set_wakeup_fd(-1)
    for told in (signal.SIGCHLD, *ASKS_TO_STOP):
        signal.signal(told, signal.default_int_handler if told == signal.SIGINT else signal.SIG_DFL)
    for fd in others:
        os.close(fd)
    os.setpgid(0, 0)
    for number, fd in enumerate(fds[:2], 1):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(request["environ"])
    sys.path[:] = request["path"]
    os.chdir(request["folder"])
    with suppress(ImportError):  # it is met again, and reported, when the rank runs
        import torch

        torch.set_num_threads(request["threads"])
    from ddp_recipes.launchers import worker

    worker.work(*fds[2:])


if __name__ == "__main__":
    main()
