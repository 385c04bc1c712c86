"""Signals, names, sockets and exits of processes, by Linux and the interpreter."""

import errno
import gc
import io
import os
import signal
import socket
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from ddp_recipes._compat import can_run_exit_handlers, join_threads, run_exit_handlers
from ddp_recipes.errors import Preempted, RequestError


def die_with_parent() -> None:
    """Be killed when the process that started this one dies, also if this one is stopped."""
    _prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def set_name(name: str) -> None:
    """Show this name in ``ps -o comm`` and ``top``, up to 15 characters of it."""
    _prctl(15, name.encode())  # PR_SET_NAME


def name_of(process: int) -> str:
    """Return the name that :func:`set_name` has set; empty of a process that has exited."""
    try:
        return Path(f"/proc/{process}/comm").read_text().strip()
    except OSError:
        return ""


def state(process: int) -> tuple[str, int]:
    """Return the state of a process, a letter as in ``ps``, and its parent."""
    letter, parent = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[:2]
    return letter, int(parent)


def children() -> list[int]:
    """Return the processes that this one has started, however it did."""
    return [process for process in map(int, filter(str.isdecimal, os.listdir("/proc"))) if _is_own(process)]


def is_running(process: int) -> bool:
    """Whether a process has not exited, whoever is to take note of that."""
    try:
        return state(process)[0] not in "ZX"
    except OSError:
        return False


def is_stopped(process: int) -> bool:
    """Whether a process is there but gets no time: SIGSTOP, or a debugger."""
    try:
        return state(process)[0] in "Tt"
    except OSError:
        return False


def started_at(process: int) -> int:
    """Return when a process started, in clock ticks since the machine did."""
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])


def ignore(signals: Iterable[int]) -> None:
    """Ignore these signals from now on."""
    for number in signals:
        signal.signal(number, signal.SIG_IGN)


stops: list[str] = []  # names of the signals by which this process was asked to stop a run, whatever came of that


def ignore_once(signals: Iterable[int]) -> None:
    """Ignore each of these signals once, since what it requests is done, or about to be; then take it as ever."""

    def let_pass(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

    for number in signals:
        signal.signal(number, let_pass)


@contextmanager
def handled_by(handlers: Mapping[Any, Callable[[int, FrameType | None], object]]) -> Iterator[None]:
    """Have these called at signals, in the main thread only, until the end; one that another replaced is left so."""
    in_main = threading.current_thread() is threading.main_thread()
    former = {number: signal.signal(number, handler) for number, handler in handlers.items() if in_main}
    try:
        yield
    finally:
        for number, handler in former.items():
            if signal.getsignal(number) == handlers[number]:
                signal.signal(number, handler)


@contextmanager
def interrupted_by(signals: Iterable[int]) -> Iterator[None]:
    """Raise at these signals what Ctrl-C does, where nothing else takes them; in the main thread only."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(f"stopped by {signal.Signals(number).name}")

    with handled_by({number: interrupt for number in signals if signal.getsignal(number) == signal.SIG_DFL}):
        yield


def folder_for_sockets() -> str:
    """Return the folder of temporary files, or ``/tmp`` where its name leaves no room for a socket's: 107 in all."""
    given = tempfile.gettempdir()
    return given if len(os.fsencode(given)) <= 75 else "/tmp"


def shorten_names_of_sockets() -> None:
    """Have :mod:`multiprocessing`, also in processes started from here, make its sockets where their names fit.

    Else a data worker could not hand over a tensor, and the run would wait for it.
    """
    former = tempfile.tempdir
    with suppress(OSError):
        if (short := folder_for_sockets()) != tempfile.gettempdir():
            from multiprocessing import util

            tempfile.tempdir = short
            util.get_temp_dir()  # it keeps to that
    tempfile.tempdir = former


class _Stream(io.FileIO):
    """A standard stream that drops what nobody can read any more."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO, errno.ENOSPC, errno.EBADF):
                raise
            if error.errno == errno.ENOSPC and self.fileno() == 1:  # a run does not fail by what it prints
                print(f"Standard output takes no more: {error.strerror}. The run goes on.", file=sys.stderr)
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            return super().write(data)


def ignore_broken_pipe() -> None:
    """Go on when whoever reads what this process prints does not: ``| head``, a terminal that is closed."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:  # closed: the next file that is opened would be in its place
            null = os.open(os.devnull, os.O_WRONLY)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            setattr(sys, name, open(number, "w", closefd=False))  # noqa: SIM115
        stream = getattr(sys, name)
        if type(stream) is io.TextIOWrapper and type(getattr(stream.buffer, "raw", stream.buffer)) is not _Stream:
            stream.flush()
            raw = _Stream(stream.fileno(), "w", closefd=False)
            kept = {each: getattr(stream, each) for each in ("encoding", "errors", "line_buffering", "write_through")}
            setattr(sys, name, io.TextIOWrapper(raw if kept["write_through"] else io.BufferedWriter(raw), **kept))


@contextmanager
def loading() -> Iterator[None]:
    """Load modules without collecting garbage, which takes a sixth of the time that torch needs, and frees nothing.

    Raises:
        RequestError: torch cannot be loaded.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    except Exception as error:
        if "torch" in sys.modules:
            raise
        raise RequestError(f"torch cannot be loaded here: {type(error).__name__}: {error}") from error
    finally:
        if enabled:
            gc.enable()


def leave(status: int) -> NoReturn:
    """Exit as ``sys.exit`` would, but without unloading torch, which takes another second.

    Exit handlers run, and files that nobody closed are flushed. Threads are waited for, but not after a failure, in
    which they may be stuck; processes are ended then. Under a debugger or a profiler it is ``sys.exit``.
    """
    if _is_watched() or not can_run_exit_handlers():
        sys.exit(status)
    if status in (0, Preempted.exit_status):
        join_threads()  # idle pools of threads and of processes end with it
    else:
        _end_children()  # those of a pool, which an exit handler would wait for and nobody tells to end
    run_exit_handlers()
    writers = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
    for file in (sys.stdout, sys.stderr, *(each for each in gc.get_objects() if issubclass(type(each), writers))):
        with suppress(OSError, ValueError):  # nobody reads it any more, or it is closed
            file.flush()
    os._exit(status)


def _end_children(seconds: float = 2.0) -> None:
    """End what :mod:`multiprocessing` started and would wait for, by SIGTERM, and after so long by SIGKILL."""
    from multiprocessing import active_children  # loaded already where there are any

    children = [each for each in active_children() if not each.daemon and _is_own(each.pid)]
    for child in children:
        child.terminate()
    end = time.monotonic() + seconds
    for child in children:
        child.join(max(end - time.monotonic(), 0))
        if child.pid is not None and _is_own(child.pid):
            os.kill(child.pid, signal.SIGKILL)  # loky's have no kill()


def _is_own(process: int | None) -> bool:
    """Whether this process started that one: a fork knows those of its parent, too."""
    try:
        return process is not None and state(process)[1] == os.getpid()
    except OSError:
        return False


def _is_watched() -> bool:
    """Whether a debugger, a profiler or an interactive interpreter has to run after this program."""
    monitoring = getattr(sys, "monitoring", None)  # Python >= 3.12
    tools = monitoring is not None and any(monitoring.get_tool(number) for number in range(6))
    return bool(tools or sys.gettrace() or sys.getprofile() or sys.flags.inspect)


def _prctl(option: int, argument: int | bytes) -> None:
    import ctypes

    ctypes.CDLL(None).prctl(option, argument)


@contextmanager
def garbage_left() -> Iterator[None]:
    """Leave to this process what it no longer needs: in one that is forked meanwhile nothing of it is destroyed.

    A process group there has lost its threads, and waits for them.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def connections() -> set[int]:
    """Return the inodes of this process's TCP sockets."""
    return {os.fstat(each.fileno()).st_ino for each in sockets()}


def lines() -> dict[int, tuple[int, int]]:
    """Return this process's TCP connections: the port here and the one at the other end, by their inodes."""
    found = {}
    for each in sockets():
        with suppress(OSError):  # it listens, or the other end has hung up
            found[os.fstat(each.fileno()).st_ino] = each.getsockname()[1], each.getpeername()[1]
    return found


def disconnect(inodes: set[int]) -> None:
    """End connections at once; closing would not, where a data worker, a fork, holds them as well."""
    for each in sockets():
        if os.fstat(each.fileno()).st_ino in inodes and not listens(each):
            with suppress(OSError):  # the other end has hung up
                each.shutdown(socket.SHUT_RDWR)


def sockets() -> Iterator[socket.socket]:
    """Yield this process's TCP sockets, each as a copy that is open until the next one."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as copy:
                if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
                    yield copy


def listens(one: socket.socket) -> bool:
    """Whether a socket takes connections."""
    return bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
