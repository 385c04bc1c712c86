"""Forks ranks from a process that loads torch while the config is still being composed.

Loading torch and its compiler takes seconds. Here it is paid once, for all local ranks and all jobs of a sweep. Only
torch and this package are loaded, nothing of a user's, and no CUDA context is made: a fork does not survive one.

Why not :mod:`multiprocessing.forkserver`, which forks as quickly: each of its ranks holds the pipe whose end ends the
server, so a stopped rank, and the server, outlive a killed controller; it runs the user's main module again in every
rank, which fails for a script without ``if __name__ == "__main__"``; a SIGTERM to the whole job ends it, and the ranks
before they have saved; starting a rank waits for it without a timeout; and nothing public ends it when a run has ended.
"""

import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from ddp_recipes.launchers.reports import died
from ddp_recipes.runtime.job import ASKS_TO_STOP
from ddp_recipes.runtime.process import die_with_parent, ignore, is_running, is_stopped, loading

WAIT_S = 2.0  # for the report that a rank has exited, of a server that is stopped
LOAD_S = 1800.0  # of one that runs; also to load torch, and to fork
MAX_FDS = 8
MAX_BYTES = 256  # of a message


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
                [sys.executable, "-P", "-c", f"from {__name__} import main; main({theirs.fileno()})"],
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
                message = self._channel.recv(MAX_BYTES)
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


def main(channel: int) -> None:
    """Load what every rank needs, then fork on request."""
    die_with_parent()
    ignore(ASKS_TO_STOP)  # a whole cgroup or job may get one: the ranks have yet to save
    become = _start_afresh  # and meet the same error, and report it: a second import of torch fails of another one
    with suppress(Exception), loading():
        import ddp_recipes.rank  # noqa: F401
        from ddp_recipes._compat.torch_ import load_what_ddp_needs

        load_what_ddp_needs()
        become = _run_loaded
    gc.freeze()  # so that collections in the ranks do not copy all these pages
    serve(socket.socket(fileno=channel), become)


def serve(channel: socket.socket, become: Callable[..., NoReturn]) -> None:
    """Fork ranks and signal them on request, and report their exit codes, until the channel closes.

    Args:
        become: runs a rank in a fork, with its file descriptors.
    """

    def report(what: str, number: int, value: int) -> None:
        with suppress(BrokenPipeError):
            channel.sendall(json.dumps([what, number, value]).encode())

    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    numbers: dict[int, int] = {}  # of ranks, by process
    while True:
        ready = select.select([channel.fileno(), woken], [], [])[0]
        if woken in ready:
            os.read(woken, 1 << 10)
            while numbers and (ended := os.waitpid(-1, os.WNOHANG))[0]:
                report("exited", numbers.pop(ended[0]), os.waitstatus_to_exitcode(ended[1]))
        if channel.fileno() in ready:
            message, fds, _, _ = socket.recv_fds(channel, MAX_BYTES, MAX_FDS)
            if not message:
                return
            what, number, value = json.loads(message)
            if what == "signal":
                for process in (process for process in numbers if numbers[process] == number):
                    os.kill(process, value)
                continue
            with warnings.catch_warnings():
                # Python >= 3.12 warns of a fork while there are threads: NumPy's are idle, and made for it.
                warnings.simplefilter("ignore", DeprecationWarning)
                process = os.fork()
            if process == 0:
                signal.set_wakeup_fd(-1)
                for fd in (channel.fileno(), woken, wake):
                    os.close(fd)
                _become_rank(become, *fds)
            for fd in fds:
                os.close(fd)
            numbers[process] = number
            report("forked", number, process)


def _become_rank(become: Callable[..., NoReturn], request: int, out: int, err: int, *arguments: int) -> NoReturn:
    """Turn this fork into what a process started for the rank alone would be, and run it."""
    for number in (signal.SIGCHLD, *ASKS_TO_STOP):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.setpgid(0, 0)
    for standard, fd in enumerate((out, err), 1):
        os.dup2(fd, standard)
        os.close(fd)
    with os.fdopen(request) as file:
        file.seek(0)
        values = json.load(file)
    os.environ.clear()
    os.environ.update(values["environ"])
    sys.path[:] = values["path"]
    os.chdir(values["folder"])
    become(*arguments)


def _run_loaded(*arguments: int) -> NoReturn:
    """Be a rank, with what is loaded."""
    import torch

    from ddp_recipes.launchers import worker

    with suppress(ValueError, RuntimeError):  # a number that is none torch leaves alone
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    worker.work(*arguments)


def _start_afresh(*arguments: int) -> NoReturn:
    """Be a rank, and load what it needs in a program of its own."""
    for each in arguments:
        os.set_inheritable(each, True)
    os.execv(sys.executable, afresh(arguments))


def afresh(arguments: Sequence[int]) -> list[str]:
    """Return the command of a rank that loads all by itself."""
    work = f"from ddp_recipes.launchers.worker import work; work({', '.join(map(str, arguments))})"
    return [sys.executable, "-P", "-c", work]
