"""What ranks exchange, and how that ends where a rank is lost: torch's own collectives and messages may not.

Of NCCL's none raises anything then: they wait on the device for ever. Whoever notices the loss aborts them from another
thread, and the device goes on with whatever they have left.

Of what gloo is sending or receiving at the very moment when the other end hangs up it tells nobody (``signalException``
in its transport/tcp/pair.cc, of November 2026, passes over it), and who waits for that waits for the whole timeout.
Mostly that takes tensors of megabytes: what is smaller arrives in one piece.
"""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread, local
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_recipes._compat.torch_ import every_group
from ddp_recipes.devices import is_accelerator, record
from ddp_recipes.errors import RequestError
from ddp_recipes.runtime.process import connections

HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
# Threads of torch's end the process, by SIGABRT, before anybody could say which rank it waited for: where a collective
# takes too long or is aborted, where the device has an error, and where one of them is not heard of for minutes. Before
# that they wait for a minute, to write what is written here.
SETTINGS = {
    HANDLING: "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}
ASK_S = 5e-5  # between looks at the device, of who waits for it
WATCH_S = 1.0  # of who watches it


def leave_failures_to_us() -> None:
    """Set what groups of NCCL read when they are made, unless the user has.

    Raises:
        RequestError: torch is to abort collectives by itself, and to tell nobody.
    """
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    if os.environ[HANDLING] == "2":
        raise RequestError(
            f"{HANDLING}=2 has torch abort collectives without an error, and a run would go on with what they leave. "
            f"Leave the variable out."
        )


class Exchanges:
    """Keeps what was aborted from being used. Without ``abort`` there is nothing that could be.

    Args:
        devices: that collectives are enqueued on.
        timeout_s: how long one may take.
        abort: ends those that are under way.
        settles: whether what was aborted may be used, because this process goes on after the loss of a rank.

    Attributes:
        lost: whether a rank is lost, so that any error may come of that.
        late: whether that was noticed here: the devices came no further for as long as a collective may take.
        recorders: of what is exchanged, which note it as long as they are kept.
    """

    def __init__(
        self,
        devices: Sequence[torch.device] = (),
        timeout_s: float = 0.0,
        abort: Callable[[], None] | None = None,
        settles: bool = True,
    ) -> None:
        self._devices = [device for device in devices if is_accelerator(device)]
        self._timeout_s, self._abort, self._settles = timeout_s, abort, settles
        self._ends = Lock()  # torch does not expect two threads to abort one group
        self._over, self._seen = Event(), time.monotonic()
        self.lost = self.late = False
        self.recorders: list[object] = []
        if self._devices and abort is not None:
            Thread(target=self._watch, daemon=True).start()

    def end(self) -> None:
        """Abort what is under way; any thread may call it, and again."""
        self.close()
        if self._abort is not None:
            self.lost = True
            with self._ends:
                self._abort()

    def close(self) -> None:
        """Watch the devices no more: the group is left."""
        self._over.set()
        self.recorders = []

    def synchronize(self) -> None:
        """Wait, where this process goes on after a loss, until the devices have all that was exchanged.

        Called before it is used.

        Raises:
            DistBackendError: they have not in time, or a rank was lost meanwhile.
        """
        self._seen = time.monotonic()
        if self._settles and self._abort is not None:
            marks = [record(device) for device in self._devices]
            while not all(mark.query() for mark in marks):
                if time.monotonic() > self._seen + self._timeout_s:
                    raise self._timed_out()
                time.sleep(ASK_S)
        if self.late:
            raise self._timed_out()
        if self.lost:  # looked at last: it is set before anything is aborted
            raise dist.DistBackendError("A rank was lost, and what ranks exchanged was aborted.")

    def _timed_out(self) -> Exception:
        return dist.DistBackendError(f"Timed out waiting {self._timeout_s:g} s for what ranks exchange.")

    def _watch(self) -> None:
        """Abort what the devices wait for, as this process may, without an end: in any code that needs a value.

        They are asked nothing as long as the process comes by :meth:`synchronize`.
        """
        patience = self._timeout_s / 2
        look_s = min(patience, WATCH_S)
        while not self._over.wait(look_s):
            if time.monotonic() < self._seen + patience:
                continue
            answered, asked = Event(), time.monotonic()
            Thread(target=self._ask, args=(answered, look_s), daemon=True).start()
            while not answered.wait(look_s):
                if self._over.is_set():
                    return
                if time.monotonic() > asked + patience:
                    self.late = True
                    self.end()
                    return

    def _ask(self, answered: Event, look_s: float) -> None:
        """Say once the devices have done what is enqueued until now.

        On a thread of its own: a device takes no more work, an event's neither, while as much waits as it has room for.
        """
        with suppress(RuntimeError):  # an error of a device, which the process gets as well
            marks = [record(device) for device in self._devices]
            while not all(mark.query() for mark in marks):
                time.sleep(look_s)
        answered.set()


# --- over connections, as gloo's

LOOK_S = 0.5  # between looks at the connections, by who waits
LARGE = 1 << 16  # bytes: a message that often arrives in parts

_held = set[int]()  # the connections to the other ranks, by their inodes
_least = LARGE  # bytes of a message that is waited for by a thread
_stuck: list[Any] = []  # what threads of gloo's still wait for: whoever frees it would wait for them


def hold(inodes: set[int], least: int = LARGE) -> None:
    """Note the connections to the other ranks, all of which there are until the ranks part.

    Args:
        least: bytes of a message of which the end is to be seen, at the price of a thread in between.
    """
    global _held, _least
    _held, _least = inodes, least


def exchanged(collective: Callable[..., Any], *tensors: Any, **options: Any) -> None:
    """Call a collective of ``torch.distributed``, and wait for it.

    Raises:
        RuntimeError: it failed, as by a connection that ended.
    """
    if not tensors[0].is_cpu:
        collective(*tensors, **options)
    elif (handle := collective(*tensors, async_op=True, **options)) is not None:
        wait(handle, tensors[0])


def wait(handle: dist.Work, tensor: Tensor) -> None:
    """Wait for a collective with a tensor; an accelerator waits, where that is on one.

    Raises:
        RuntimeError: as of :func:`exchanged`.
    """
    if tensor.is_cpu:
        _until(lambda: _ends_in_time(handle), handle, _held)
    else:
        handle.wait()


def _ends_in_time(handle: dist.Work) -> bool:
    try:
        handle.wait(timedelta(seconds=LOOK_S))
    except RuntimeError:
        if not handle.is_completed():
            return False
        handle.wait()  # it raises its own error, if it has one
    return True


def send(tensor: Tensor, *to: Any, line: int | None = None, **options: Any) -> None:
    """Send another rank a message, as ``torch.distributed.send``.

    Raises:
        RuntimeError: as of :func:`exchanged`.
    """
    _deliver(dist.isend(tensor, *to, **options), tensor, line)


def receive(
    tensor: Tensor, *source: Any, line: int | None = None, patience: timedelta | None = None, **options: Any
) -> None:
    """Receive another rank's message, as ``torch.distributed.recv``.

    Raises:
        RuntimeError: as of :func:`exchanged`.
    """
    _deliver(dist.irecv(tensor, *source, **options), tensor, line, patience)


def _deliver(
    handle: dist.Work | None, tensor: Tensor, line: int | None = None, patience: timedelta | None = None
) -> None:
    assert handle is not None
    if tensor.is_cpu:
        wait_for_message(handle, tensor.nbytes, line, patience)
    else:
        handle.wait()


def wait_for_message(handle: dist.Work, size: int, line: int | None = None, patience: timedelta | None = None) -> None:
    """Wait for a message of so many bytes that is being sent or received between CPUs.

    Args:
        line: the connection by which it comes, an inode; ``None``: any of the other ranks' may be missed.
        patience: how long; ``None``: as long as for any collective.

    Raises:
        RuntimeError: as of :func:`exchanged`.
    """
    wait = handle.wait if patience is None else partial(handle.wait, patience)
    if size < _least:
        wait()
        return
    waiter = _waiters.waiter = getattr(_waiters, "waiter", None) or _Waiter()
    waiter.waits.put(wait)
    try:
        _until(waiter.has_one, handle, _held if line is None else {line})
    except BaseException:
        del _waiters.waiter  # it may wait for long
        raise


class _Waiter:
    """A thread that waits for messages: a wait for one that runs out of time ends all connections."""

    def __init__(self) -> None:
        self.waits = SimpleQueue[Callable[[], object]]()
        self._ended = SimpleQueue[Exception | None]()
        Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        while True:
            try:
                self.waits.get()()
            except RuntimeError as error:
                self._ended.put(error)
            else:
                self._ended.put(None)

    def has_one(self) -> bool:
        """Whether a message is through in time; raise what became of it."""
        try:
            error = self._ended.get(timeout=LOOK_S)
        except Empty:
            return False
        if error is not None:
            raise error
        return True


_waiters = local()  # of each thread


def _until(done: Callable[[], bool], handle: dist.Work, held: set[int]) -> None:
    """Call until something is done; not for ever once one of the connections has ended."""
    ended = False
    while not done():
        if ended:
            _stuck.append((handle, every_group()))
            raise RuntimeError("Connection closed by another rank, in the middle of what it sent or received.")
        ended = not held <= connections()
