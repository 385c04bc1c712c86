"""Messages over a store that strangers may reach too: each carries a keyed digest, and every wait has a bound."""

import hmac
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from hashlib import blake2b
from typing import TypeVar

from torch.distributed import PrefixStore, Store

from ddp_recipes._compat.messages import timed_out
from ddp_recipes.errors import RunFailed

T = TypeVar("T")

CALL_S = 1.5  # for one call of the store: what is there is answered at once
LOOK_S = 1.0  # between looks at whether the process that is waited for has exited
AWAKE_S = 0.5  # once more, for a process that was itself stopped meanwhile


class Messages:
    """Texts in a store, under names. With a key a reader takes only what was written with it, and under that name.

    Names hold the run, the rank and a number, so that an old message is worth nothing in another place. Once a call
    has got no answer, its process being dead, stopped or cut off, ``lost`` is set and no other call is made.

    Args:
        private: whether nobody but the ranks has the store.
        holders: returns the ranks that keep the store from the others, as far as that can be known.

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
    ) -> None:
        self.store, self.lost = store, False
        self.private, self.proven = private, bool(key) or private
        self.holders = holders
        self.key, self._scope = key, scope

    def under(self, name: str) -> "Messages":
        """Return the messages of a part, which may still be had where others are lost."""
        scope = f"{self._scope}/{name}"
        found = Messages(PrefixStore(name, self.store), self.key, scope, self.private, self.holders)
        found.exited = self.exited
        return found

    def set(self, name: str, text: str, patience: float = CALL_S) -> None:
        """Write a message; wait so many seconds for the store to take it."""
        self.call(partial(self.store.set, name, self._sign(name, text)), None, patience)

    def get(self, name: str, seconds: float = 0.0, patience: float = CALL_S) -> str | None:
        """Return a message if it is there in time.

        Args:
            patience: in seconds, for the answer itself, which a process on a busy machine gives late.

        Raises:
            RunFailed: something else is there.
        """

        def read() -> str | None:
            if seconds <= 0:
                return self.store.get(name).decode(errors="replace") if self.store.check([name]) else None
            try:
                self.store.wait([name], timedelta(seconds=seconds))
            except RuntimeError as error:
                if not timed_out(error):
                    raise
                return None
            return self.store.get(name).decode(errors="replace")

        # Where the process with the store is stopped, torch's own timeout waits for its answer for ever.
        found = self.call(read, None, seconds + patience)
        return None if found is None else self._verify(name, found)

    def first(self, name: str, text: str) -> str:
        """Write a message unless there is one; return the one that is there."""
        mine = self._sign(name, text)
        return self._verify(name, self.call(partial(self.store.compare_set, name, "", mine), mine.encode()).decode())

    def there(self, *names: str) -> list[str]:
        """Return which of these are there, written with the key."""
        nothing: dict[str, bytes] = {}
        found = self.call(lambda: {name: self.store.get(name) for name in names if self.store.check([name])}, nothing)
        return [name for name, text in found.items() if self._is_proven(name, text.decode(errors="replace"))]

    def claimed(self, *names: str) -> list[str]:
        """Return which of these are there, whoever wrote them."""
        return self.call(lambda: [name for name in names if self.store.check([name])], [])

    def call(self, call: Callable[[], T], otherwise: T, seconds: float = CALL_S) -> T:
        """Return what a call of the store returns, or ``otherwise`` if there is no answer in time."""
        if self.lost:
            return otherwise
        outcome: list[T] = []

        def run() -> None:
            with suppress(RuntimeError):
                outcome.append(call())

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(seconds)
        if not outcome:
            thread.join(AWAKE_S)
        self.lost = not outcome
        return outcome[0] if outcome else otherwise

    def _sign(self, name: str, text: str) -> str:
        return f"{self._digest(name, text)}:{text}"

    def _verify(self, name: str, signed: str) -> str:
        if not self._is_proven(name, signed):
            raise RunFailed(
                f"The message {self._scope}/{name} in the store where ranks meet was not written with this rank's key. "
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
        return blake2b(f"{self._scope}/{name}\n{text}".encode(), key=self.key, digest_size=16).hexdigest()


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
        """Write a value."""
        self._messages.set(key, as_text(value))

    def get(self, key: str) -> bytes:
        """Wait for a value, and return it."""
        return self._wait(key, self._timeout)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all are there."""
        for key in keys:
            self._wait(key, timeout or self._timeout)

    def _wait(self, key: str, timeout: timedelta) -> bytes:
        """Return a value; raise if it does not come in time, or a rank has exited: then no group comes about."""
        deadline = time.monotonic() + timeout.total_seconds()
        exited: list[int] = []
        while not self._messages.lost and (left := deadline - time.monotonic()) > 0:
            if (value := self._messages.get(key, min(left, LOOK_S))) is not None:
                return value.encode("latin-1")
            if exited:
                raise RuntimeError(f"Rank {', '.join(map(str, exited))} has exited: no {key} in the store.")
            exited = sorted(self._messages.exited())  # what was written before is there: look once more
        raise RuntimeError(f"Timed out after {timeout.total_seconds():g} seconds: no {key} in the store.")
