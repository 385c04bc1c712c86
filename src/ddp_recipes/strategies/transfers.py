"""Collectives and messages of torch's, which end where a connection does.

Gloo's own may not: of what it is sending or receiving at the very moment when the other end hangs up it tells nobody
(``signalException`` in its transport/tcp/pair.cc, of November 2026, passes over it), and who waits for that waits for
the whole timeout. Mostly that takes tensors of megabytes: what is smaller arrives in one piece.
"""

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread, local
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ddp_recipes._compat.torch_ import every_group
from ddp_recipes.runtime.process import connections

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


def all_gather_single(into: Tensor, mine: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Gather a tensor of each rank into one; torch 2.14 gave this its name, and warns of the one before."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    exchanged(gather, into, mine, group=group)


def reduce_scatter_single(into: Tensor, all_: Tensor, group: dist.ProcessGroup, op: Any) -> None:
    """Reduce a tensor of each rank, and leave each its part; torch 2.14 gave this its name."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    exchanged(scatter, into, all_, group=group, op=op)


def send(tensor: Tensor, *to: Any, line: int | None = None, **options: Any) -> None:
    """Send another rank a message, as ``torch.distributed.send``.

    Args:
        line: as of :func:`wait_for_message`.

    Raises:
        RuntimeError: as of :func:`exchanged`.
    """
    _deliver(dist.isend(tensor, *to, **options), tensor, line)


def receive(
    tensor: Tensor, *source: Any, line: int | None = None, patience: timedelta | None = None, **options: Any
) -> None:
    """Receive another rank's message, as ``torch.distributed.recv``.

    Args:
        line, patience: as of :func:`wait_for_message`.

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
