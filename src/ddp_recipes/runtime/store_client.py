"""The one client of a store that all of a process goes through, however late the store answers. Loads torch."""

import threading
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar

from torch.distributed import Store

T = TypeVar("T")

CALL_S = 1.5  # for an answer, where whoever asks goes on without one
LOOK_S = 1.0  # between looks at what else has happened
AWAKE_S = 0.5  # once more, for a process that was itself stopped meanwhile
AGAIN_S = 5.0  # without an answer, until another connection is tried; twice as long until the next


@dataclass(frozen=True)
class _Request:
    """A call of the store: one that may be made twice, for the answer to the first may get lost.

    Attributes:
        within_s: how long the store itself waits, for what is not there yet.
    """

    client: "StoreClient"
    call: Callable[[Store], Any]
    within_s: float
    future: "Future[Any]"


class StoreClient:
    """Makes one call of a store after the other, in a thread.

    A call may take long where the process with the store is stopped or busy, and torch's own timeouts wait for that
    process. Whoever asks waits as long as the question deserves, and nothing else follows from a late answer: what is
    to be written is written then, and the next question is asked.

    Args:
        connect: opens another connection, for where one is closed, or so long silent that it may be dead.

    Attributes:
        closed: whether the store has closed the connection and takes no other one.
    """

    def __init__(self, store: Store, connect: Callable[[], Store] | None = None) -> None:
        self.store, self._connect = store, connect
        self.closed = False
        self._requests: SimpleQueue[_Request | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._asked: _Request | None = None  # which the store has
        self._due = self._next_try = 0.0  # of its answer, and of another connection
        self._patience = AGAIN_S
        weakref.finalize(self, self._requests.put, None).atexit = False

    @property
    def silent_s(self) -> float:
        """For how long an answer has been overdue."""
        if self.closed:
            return float("inf")
        return 0.0 if self._asked is None else max(0.0, time.monotonic() - self._due)

    def post(self, call: Callable[[Store], T], within_s: float = 0.0) -> "Future[T]":
        """Have a call made after those before it; unless its future is cancelled by then."""
        future: Future[T] = Future()
        self._requests.put(_Request(self, call, within_s, future))
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=_serve, args=(self._requests,), daemon=True)
                self._thread.start()
        return future

    def wait(self, asked: Iterable["Future[Any]"], seconds: float, given_up: Callable[[], bool] | None = None) -> None:
        """Wait so long for answers; shortly, once it is given up."""
        left, deadline = {*asked}, time.monotonic() + seconds
        while left and (seconds := deadline - time.monotonic()) > 0:
            left = wait(left, min(seconds, LOOK_S)).not_done
            self._look_for_another()
            if left and given_up is not None and given_up():
                deadline, given_up = min(deadline, time.monotonic() + CALL_S), None
        wait(left, AWAKE_S)

    def ask(
        self,
        call: Callable[[Store], T],
        seconds: float = CALL_S,
        within_s: float = 0.0,
        given_up: Callable[[], bool] | None = None,
    ) -> T | None:
        """Return what a call returns that only reads; ``None`` if there is no answer in time, or none any more."""
        future = self.post(call, within_s)
        self.wait([future], seconds, given_up)
        return None if future.cancel() or isinstance(future.exception(), RuntimeError) else future.result()

    def _look_for_another(self) -> None:
        """Try another connection, from another thread, where this one has long been silent."""
        with self._lock:
            now, asked = time.monotonic(), self._asked
            if self._connect is None or asked is None or now < max(self._due + AGAIN_S, self._next_try):
                return
            self._patience *= 2
            self._next_try = now + self._patience
        threading.Thread(target=self._replace, args=(asked,), daemon=True).start()

    def _replace(self, asked: _Request) -> None:
        """Go on with another connection, from what has not been answered, unless there is an answer by then."""
        assert self._connect is not None
        with suppress(RuntimeError):
            store = self._connect()
            with self._lock:
                if self._asked is not asked:
                    return
                self.store, self._thread = store, threading.current_thread()
            _serve(self._requests, asked)

    def answer(self, asked: _Request) -> bool:
        """Make a call; return whether this thread is to make the next one."""
        with self._lock:
            self._asked, self._due = asked, time.monotonic() + asked.within_s
        with suppress(InvalidStateError):  # another thread has been as quick, or nobody waits any more
            try:
                asked.future.set_result(self._called(asked.call))
            except Exception as error:  # noqa: BLE001 - the future raises it where it is awaited
                asked.future.set_exception(error)
        with self._lock:
            if self._thread is not threading.current_thread():
                return False
            self._asked, self._patience = None, AGAIN_S
        return True

    def _called(self, call: Callable[[Store], T]) -> T:
        """Make a call, once more if the connection is closed."""
        try:
            answer = call(self.store)
        except RuntimeError:
            now = time.monotonic()
            if self._connect is None or (self.closed and now < self._next_try):
                self.closed = True
                raise
            self.closed, self._next_try = True, now + AGAIN_S
            self.store = self._connect()
            answer = call(self.store)
        self.closed = False
        return answer


def _serve(requests: "SimpleQueue[_Request | None]", asked: _Request | None = None) -> None:
    """Make calls until nobody is left who could ask: between them this refers to no client."""
    asked = asked or requests.get()
    while asked is not None and (asked.future.cancelled() or asked.client.answer(asked)):
        asked = None
        asked = requests.get()
