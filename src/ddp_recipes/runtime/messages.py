"""Messages over a store that strangers may reach too: each carries a keyed digest, and every wait has a bound.

All that a process asks of a store goes through one client, however late the store answers.
"""

import hmac
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from hashlib import blake2b
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

from torch.distributed import FileStore, PrefixStore, Store

from ddp_recipes._compat.messages import timed_out
from ddp_recipes.errors import RunFailed

T = TypeVar("T")

CALL_S = 1.5  # for an answer, where whoever asks goes on without one
LOOK_S = 1.0  # between looks at what else has happened
AWAKE_S = 0.5  # once more, for a process that was itself stopped meanwhile
TRIES = 4  # connections, one right after the other, before the store counts as closed: a network may drop several
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
        self._opening = [0, 0]  # how often another connection has begun to be opened, and ended to
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
        with suppress(RuntimeError):
            store = self._another()
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
        """Make a call, again over other connections if this one is closed, as long as somebody takes them."""
        try:
            answer = call(self.store)
        except RuntimeError:
            now = time.monotonic()
            if self._connect is None or (self.closed and now < self._next_try):
                self.closed = True
                raise
            self.closed, self._next_try = True, now + AGAIN_S
            answer = self._called_anew(call)
        self.closed = False
        return answer

    def _called_anew(self, call: Callable[[Store], T]) -> T:
        for _ in range(TRIES - 1):
            self.store = self._another()
            with suppress(RuntimeError):
                return call(self.store)
        self.store = self._another()
        return call(self.store)

    def _another(self) -> Store:
        assert self._connect is not None
        self._opening[0] += 1
        try:
            return self._connect()
        finally:
            self._opening[1] += 1

    def opens_none(self) -> Callable[[], bool]:
        """Return what says whether no connection has been opened since this call: whose a new one is cannot be seen."""
        before = [*self._opening]
        return lambda: before[0] == before[1] and before == self._opening


def _serve(requests: "SimpleQueue[_Request | None]", asked: _Request | None = None) -> None:
    """Make calls until nobody is left who could ask: between them this refers to no client."""
    asked = asked or requests.get()
    while asked is not None and (asked.future.cancelled() or asked.client.answer(asked)):
        asked = None
        asked = requests.get()


NOT_OURS_S = 0.05  # between looks at what somebody else has written over


class Messages:
    """Texts in a store, under names. With a key a reader takes only what was written with it, and under that name.

    Names hold the run, the rank and a number, so that an old message is worth nothing in another place. What is
    written is there before anything that is written or asked after it. Where the store does not answer in time, a
    reader gets nothing, and can ask again.

    Args:
        private: whether nobody but the ranks has the store.
        holders: returns the ranks that keep the store from the others, as far as that can be known.
        connect: opens another connection to the store.

    Attributes:
        key: that others prove to have; empty without one.
        exited: returns the ranks whose process is known to have exited.
    """

    exited: Callable[[], Iterable[int]] = staticmethod(tuple)

    def __init__(
        self,
        store: Store,
        key: bytes = b"",
        scope: str = "",
        private: bool = False,
        holders: Callable[[], list[int]] = list,
        connect: Callable[[], Store] | None = None,
    ) -> None:
        self._client = StoreClient(store, connect)
        self.private, self.proven = private, bool(key) or private
        self.holders = holders
        self.key, self._scope = key, scope

    def under(self, name: str) -> "Messages":
        """Return the messages of a part."""
        found = copy(self)
        found._scope = self._path(name)
        return found

    @property
    def name(self) -> str:
        return self._scope.rpartition("/")[2]

    @property
    def store(self) -> Store:
        """The store that holds these messages, for what is not a message."""
        return PrefixStore(self._scope, self._client.store) if self._scope else self._client.store

    @property
    def closed(self) -> bool:
        """Whether the store has ended, as far as this process can know."""
        return self._client.closed

    def opens_none(self) -> Callable[[], bool]:
        """Return what says whether no other connection to the store has been opened since this call."""
        return self._client.opens_none()

    @property
    def silent_s(self) -> float:
        """For how long the store has owed an answer."""
        return self._client.silent_s

    @property
    def silent(self) -> bool:
        """Whether it has for longer than a busy machine explains."""
        return self.silent_s > CALL_S

    # --- writing

    def set(self, name: str, text: str, patience: float = CALL_S) -> None:
        """Write a message; wait so many seconds for the store to take it, which it may still do later."""
        self._client.wait([self._write(name, text)], patience)

    def send(self, name: str, text: str = "") -> None:
        """Write a message, and wait for nothing."""
        self._write(name, text)

    def first(self, name: str, text: str) -> str:
        """Write a message unless there is one; return the one that is there."""
        path, mine = self._path(name), self._sign(name, text)
        there = self._client.ask(lambda store: store.compare_set(path, "", mine))
        return self._verify(name, mine if there is None else there.decode(errors="replace"))

    def delete(self, *names: str) -> None:
        """Delete messages, and wait for nothing."""
        for path in map(self._path, names):
            self._client.post(lambda store, path=path: store.delete_key(path))  # type: ignore[misc]

    def _write(self, name: str, text: str) -> "Future[None]":
        path, signed = self._path(name), self._sign(name, text)
        return self._client.post(lambda store: store.set(path, signed))

    # --- reading

    def get(
        self,
        name: str,
        seconds: float = 0.0,
        given_up: Callable[[], bool] | None = None,
        patience: float = CALL_S,
    ) -> str | None:
        """Return a message if it is there in time.

        Args:
            given_up: returns whether it need not be waited for any more; what is there by then is returned.
            patience: in seconds, for the answer itself, which a process on a busy machine gives late.

        Raises:
            RunFailed: something else is there.
        """
        found = self._await([name], seconds, given_up, patience)
        return self._verify(name, found[0]) if found else None

    def wait(
        self, names: Sequence[str], seconds: float, given_up: Callable[[], bool] | None = None, strict: bool = False
    ) -> bool:
        """Wait until all of these are there, written with the key, and return whether they are.

        Raises:
            RunFailed: something else is there, and ``strict``.
        """
        deadline = time.monotonic() + seconds
        while found := self._await(names, max(0.0, deadline - time.monotonic()), given_up):
            if strict:
                list(map(self._verify, names, found))
            if all(map(self._is_proven, names, found)):
                return True
            if time.monotonic() > deadline:
                break
            time.sleep(NOT_OURS_S)
        return not names

    def there(self, *names: str, patience: float = CALL_S) -> dict[str, str]:
        """Return those of these messages that are there, written with the key."""
        found = self._found(names, patience)
        return {name: text.partition(":")[2] for name, text in found.items() if self._is_proven(name, text)}

    def claimed(self, *names: str, patience: float = CALL_S) -> list[str]:
        """Return which of these are there, whoever wrote them."""
        return list(self._found(names, patience))

    def call(self, call: Callable[[], T], patience: float) -> T | None:
        """Return what something else returns that asks the same store; ``None`` if there is no answer in time."""
        return self._client.ask(lambda store: call(), patience)

    def _await(
        self, names: Sequence[str], seconds: float, given_up: Callable[[], bool] | None, patience: float = CALL_S
    ) -> list[str]:
        """Return what is there under all of these names; nothing if it is not in time."""
        deadline, left = time.monotonic() + seconds, seconds
        while names:
            within = min(left, LOOK_S)
            read = partial(_read, list(map(self._path, names)), within)
            found = self._client.ask(read, left + patience, within, given_up)
            if found or found is None or left == 0.0:
                return [text.decode(errors="replace") for text in found or ()]
            left = max(0.0, deadline - time.monotonic())
            if given_up is not None and given_up():
                left = 0.0
        return []

    def _found(self, names: Sequence[str], patience: float) -> dict[str, str]:
        asked = {name: self._client.post(partial(_read, [self._path(name)], 0.0)) for name in names}
        self._client.wait(asked.values(), patience)
        answers = {name: each.result() for name, each in asked.items() if not (each.cancel() or each.exception())}
        return {name: found[0].decode(errors="replace") for name, found in answers.items() if found}

    # --- what is in the store

    def _path(self, name: str) -> str:
        return f"{self._scope}/{name}" if self._scope else name

    def _sign(self, name: str, text: str) -> str:
        return f"{self._digest(name, text)}:{text}"

    def _verify(self, name: str, signed: str) -> str:
        if not self._is_proven(name, signed):
            raise RunFailed(
                f"The message {self._path(name)} in the store where ranks meet was not written with this rank's key. "
                f"Either ranks have different keys (DDP_RECIPES_KEY or ~/.ddp_recipes_key, the same for every rank, or "
                f"none), or somebody else writes to the store."
            )
        return signed.partition(":")[2]

    def _is_proven(self, name: str, signed: str) -> bool:
        digest, _, text = signed.partition(":")
        return hmac.compare_digest(digest.encode(), self._digest(name, text).encode())

    def _digest(self, name: str, text: str) -> str:
        if not self.key:
            return ""
        return blake2b(f"{self._path(name)}\n{text}".encode(), key=self.key, digest_size=16).hexdigest()


def _read(paths: list[str], seconds: float, store: Store) -> list[bytes]:
    """Return what is there under all of these, or nothing if it is not within so many seconds."""
    if seconds == 0.0:
        if not store.check(paths):
            return []
    else:
        try:
            store.wait(paths, timedelta(seconds=max(seconds, 0.01)))  # nothing would be for ever
        except RuntimeError as error:
            if not timed_out(error):
                raise
            return []
    return store.multi_get(paths) if len(paths) > 1 else [store.get(path) for path in paths]


def as_text(value: str | bytes) -> str:
    """Return what torch hands to a store as text, a character a byte: ``latin-1`` gives the bytes back."""
    return value if isinstance(value, str) else value.decode("latin-1")


class SignedStore(Store):
    """What torch writes to the store where ranks connect, their addresses, as messages: signed, and read in time.

    In a file a rank that is stopped in the midst of a call keeps it from the others, for which torch has no timeout.
    """

    def __init__(self, messages: Messages, timeout: timedelta) -> None:
        super().__init__()
        self._messages, self._timeout = messages, timeout

    def set(self, key: str, value: str | bytes) -> None:
        self._messages.set(key, as_text(value))

    def get(self, key: str) -> bytes:
        return self._wait(key, self._timeout)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self._wait(key, timeout or self._timeout)

    def _wait(self, key: str, timeout: timedelta) -> bytes:
        """Return a value; raise if it does not come in time, or a rank has exited: then no group comes about."""
        value = self._messages.get(key, timeout.total_seconds(), lambda: any(True for _ in self._messages.exited()))
        if value is not None:
            return value.encode("latin-1")
        if exited := sorted(self._messages.exited()):
            raise RuntimeError(f"Rank {', '.join(map(str, exited))} has exited: no {key} in the store.")
        if self._messages.closed:
            raise RuntimeError(f"The store where ranks meet takes no connection any more: no {key} in it.")
        raise RuntimeError(f"Timed out after {timeout.total_seconds():g} seconds: no {key} in the store.")


def in_file(store_file: int) -> Messages:
    """Return the messages of ranks that inherited this file, which has no name: nobody else comes in."""
    return Messages(FileStore(f"/proc/self/fd/{store_file}"), private=True, holders=partial(_holders, store_file))


def _holders(store_file: int) -> list[int]:
    """Return the ranks of this machine that have locked a file, as each does for an instant to read or write."""
    found = []
    with suppress(OSError, ValueError):
        for line in Path("/proc/locks").read_text().splitlines():
            _, kind, _, _, process, place, *_ = line.split()  # of one that waits for a lock the kind is an arrow
            if kind == "FLOCK" and place.endswith(f":{os.fstat(store_file).st_ino}"):
                found.append(int(Path(f"/proc/{process}/comm").read_text().removeprefix("rank ")))
    return found
