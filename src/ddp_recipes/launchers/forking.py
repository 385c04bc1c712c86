"""The process that ranks are forked from: it loads torch, then forks and signals them as the controller requests."""

import gc
import json
import os
import select
import signal
import socket
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from ddp_recipes.runtime.job import ASKS_TO_STOP
from ddp_recipes.runtime.process import die_with_parent, ignore, loading

MAX_FDS = 8
MAX_BYTES = 256  # of a message


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
    from ddp_recipes.launchers.fork_server import afresh

    os.execv(sys.executable, afresh(arguments))
