"""A Python that has loaded torch before it is started, for tests of what commands do, not of how a process begins.

A server loads torch once, and forks for each start, which saves two seconds of a core. What is started there has the
arguments, environment, folder, open files and exit status of a process of its own, and so has what it starts by
``sys.executable`` or ``multiprocessing``: the server of the local launcher, workers of torchrun. ``/proc`` shows its
environment, and ``os.getppid`` names who started it. In truth its parent is the server, and whatever is started dies
with who started it: so it is not for tests of just that.
"""

import array
import ctypes
import fcntl
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
import types
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import NoReturn

import torch

from ddp_recipes.runtime.process import die_with_parent, leave
from ddp_recipes.testing import make_job  # noqa: F401, with all that a rank needs

MAX_FDS = 64
ABOVE = 512  # all file descriptors that a program inherits
CLIENT_FLAG = "-IS"  # the first argument of the processes that stand in for forks
CLIENT_PID = "WARM_CLIENT"  # who stands in for a fork, in the environment that /proc shows of it
_ROOM = "WARM_ROOM"  # a variable that is longer than environments are, in whose place a fork shows its own

# What stands in the place of `python`: requests a fork, passes signals on, and ends as the fork does.
CLIENT = """\
#!{python} {flag}
import array, ctypes, json, os, signal, socket, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
ignored = [number for number in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(number) == signal.SIG_IGN]
opened = [int(name) for name in os.listdir("/proc/self/fd")]
inherited = [fd for fd in opened if os.path.exists(f"/proc/self/fd/{{fd}}") and os.get_inheritable(fd)]
request = os.memfd_create("request")
started = dict(argv=sys.argv, environ=dict(os.environ), folder=os.getcwd(), fds=inherited,
    ignored=ignored, client=os.getpid(), parent=os.getppid())
os.write(request, json.dumps(started).encode())
channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
channel.connect({address!r})
fds = array.array("i", [request, *inherited])
channel.sendmsg([b"start"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
process = int(channel.recv(64))
def pass_on(number, frame):
    try:
        os.kill(process, number)
    except ProcessLookupError:
        pass
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    if signal.getsignal(number) != signal.SIG_IGN:
        signal.signal(number, pass_on)
status = int(channel.recv(64) or -signal.SIGKILL)
if status < 0:
    if -status != signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
"""


@contextmanager
def warm_python(*modules: str, **environ: str) -> Iterator[str]:
    """Yield the path of a program ``python``, which other users cannot run, with these modules loaded, too.

    Args:
        environ: beside the environment, while they are loaded.
    """
    with tempfile.TemporaryDirectory() as folder:
        program, address = Path(folder, "python"), f"{folder}/socket"
        program.write_text(CLIENT.format(python=sys.executable, address=address, flag=CLIENT_FLAG))
        program.chmod(0o700)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(address)
            listener.listen(64)
            server = subprocess.Popen(
                [sys.executable, __file__, str(listener.fileno()), *modules],
                pass_fds=[listener.fileno()],
                env={**os.environ, **environ, _ROOM: " " * 2**14},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C at the terminal is not for it
            )
        SERVERS.add(server.pid)
        try:
            yield str(program)
        finally:
            SERVERS.discard(server.pid)
            server.kill()
            server.wait()


STAYS = ExitStack()  # what is closed after all tests of this process
SERVERS: set[int] = set()  # that may outlive a test


@cache
def warm() -> str:
    """Return the path of a program like ``python`` that stays for all tests of this process."""
    return STAYS.enter_context(warm_python("torch.utils.tensorboard"))


def serve(listener: socket.socket) -> None:
    """Fork for each program that connects, and report each fork's id and end, until this is killed."""
    forks: dict[socket.socket, int] = {}  # by channel: a file descriptor of the process, 0 until there is one
    while True:
        ready = select.select([listener, *forks, *filter(None, forks.values())], [], [])[0]
        for channel, process in list(forks.items()):
            if channel in ready and not process:
                forks[channel] = start(channel)
            elif channel in ready or process in ready:
                report(channel, process)
                del forks[channel]
        if listener in ready:
            forks[listener.accept()[0]] = 0


def start(channel: socket.socket) -> int:
    """Fork as a program requests, and return a file descriptor of that process."""
    size = array.array("i").itemsize
    messages = []
    with suppress(ConnectionError):
        _, messages, _, _ = channel.recvmsg(64, socket.CMSG_SPACE(MAX_FDS * size))
    fds = array.array("i", messages[0][2] if messages else b"")
    process = os.fork()
    if process == 0:
        if not fds:  # the program was killed before it had asked for anything
            os._exit(0)
        become(fds[0], list(fds[1:]))
    for fd in fds:
        os.close(fd)
    with suppress(ConnectionError):  # the program was killed
        channel.send(str(process).encode())
    return os.pidfd_open(process)


def report(channel: socket.socket, process: int) -> None:
    """Tell a program how its fork ended, and kill the fork first if it is the program that ended before."""
    signal.pidfd_send_signal(process, signal.SIGKILL)  # nothing comes of it where the fork has exited
    ended = os.waitid(os.P_PIDFD, process, os.WEXITED)
    assert ended is not None
    status = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    with suppress(ConnectionError), channel:
        channel.send(str(status).encode())
    os.close(process)


def become(request: int, fds: list[int]) -> NoReturn:
    """Turn this fork into what ``python`` would be, and run that."""
    with os.fdopen(request) as file:
        file.seek(0)
        start = json.load(file)
    # First above all numbers that they may get.
    above = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, ABOVE) for fd in fds]
    os.closerange(3, ABOVE)
    for fd, number in zip(above, start["fds"], strict=True):
        os.dup2(fd, number)
        os.close(fd)
    os.setsid()
    os.chdir(start["folder"])
    os.environ.clear()
    os.environ.update(start["environ"])
    show_environ({**start["environ"], CLIENT_PID: str(start["client"])})
    for number in (signal.SIGINT, signal.SIGHUP):
        usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in start["ignored"] else usual)
    own, parent_of = os.getpid(), os.getppid
    os.getppid = lambda: start["parent"] if os.getpid() == own else parent_of()
    program, *arguments = start["argv"]
    sys.executable = program
    multiprocessing.set_executable(program)
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    status: object = None
    try:
        execute(arguments)
    except SystemExit as exit:
        status = exit.code
    except BaseException:
        traceback.print_exc()
        status = 1
    if isinstance(status, str):
        print(status, file=sys.stderr)
    leave(status if isinstance(status, int) else int(status is not None))


def show_environ(environ: Mapping[str, str]) -> None:
    """Let ``/proc`` show this environment of this process, and of what it forks."""
    begin = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47])
    there = Path("/proc/self/environ").read_bytes()
    at = there.index(f"{_ROOM}=".encode())
    room = there.index(b"\0", at) - at
    shown = b"".join(f"{name}={value}\0".encode() for name, value in environ.items())
    ctypes.memmove(begin + at, shown[:room].ljust(room, b"\0"), room)


def execute(arguments: list[str]) -> None:
    """Run what ``python`` runs with these arguments."""
    flags = set(takewhile({"-B", "-P", "-u"}.__contains__, arguments))
    what, *sys.argv = arguments[len(flags) :]
    finds = "-P" not in flags  # modules in the folder
    if "-u" in flags:
        sys.stdout.reconfigure(write_through=True)
    folder = str(Path(what).absolute().parent) if what[:1] != "-" else os.getcwd() if what == "-m" else ""
    sys.path[:0] = [folder] if finds else []
    if what == "-m":
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    elif what in ("-c", "-"):
        code = sys.stdin.read() if what == "-" else sys.argv.pop(0)
        sys.argv.insert(0, what)
        sys.modules["__main__"] = module = types.ModuleType("__main__")
        exec(compile(code, "<string>", "exec"), vars(module))
    else:
        sys.argv.insert(0, what)
        runpy.run_path(what, run_name="__main__")


if __name__ == "__main__":
    die_with_parent()
    del sys.path[0]
    for name in sys.argv[2:]:
        importlib.import_module(name)
    for finalizer in list(weakref.finalize._registry):
        finalizer.atexit = False  # no fork takes apart at its end what torch has registered here
    gc.freeze()  # so that collections in the forks do not copy all these pages
    serve(socket.socket(fileno=int(sys.argv[1])))
