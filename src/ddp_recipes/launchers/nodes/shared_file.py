"""A store in a file that all nodes share, which no node's loss takes away. Loads torch."""

import fcntl
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from torch.distributed import Store

from ddp_recipes.runtime.files import open_file, write_aside
from ddp_recipes.runtime.messages import as_text

LOOK_S = 0.02
FIRST_LINE = b"ddp_recipes: nodes of a run meet here\n"
LOCK_S = 10.0
MOST = 1 << 26  # bytes
TIMEOUT = timedelta(seconds=60)


class SharedFile(Store):
    """A few small values in one file, which is read and written whole.

    Whoever writes locks a file beside it and puts another one in its place: readers need no lock, and a process that
    dies in the midst leaves what was there. Torch's :class:`FileStore` appends what is written, twice a second here,
    and keeps it for ever.

    Args:
        silent_s: where nothing was written for so many seconds, what is there is of a run that has ended: left out.

    Raises:
        RuntimeError: the file cannot be read or written, as torch's stores do.
    """

    def __init__(self, path: Path, silent_s: float) -> None:
        super().__init__()
        self._path, self._lock, self._silent_s = path, path.with_name(f"{path.name}.lock"), silent_s
        path.parent.mkdir(parents=True, exist_ok=True)
        self.begin()

    def begin(self) -> None:
        """Make the file, or empty one that is of a run that has ended."""
        with self._writing() as now:
            found = self._read() if self._path.exists() else None
            if found is None or (found and now - self._path.stat().st_mtime > self._silent_s):
                self._write({})

    def set(self, key: str, value: str | bytes) -> None:
        with self._writing():
            self._write(self._read() | {key: as_text(value)})

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Write a value where the ``expected`` one is, or none where that is empty; return what is there then."""
        with self._writing():
            values = self._read()
            if values.get(key, "") == as_text(expected):
                values[key] = as_text(desired)
                self._write(values)
        return values.get(key, as_text(expected)).encode("latin-1")

    def get(self, key: str) -> bytes:
        return self._awaited([key], TIMEOUT)[key].encode("latin-1")

    def check(self, keys: Sequence[str]) -> bool:
        return self._read().keys() >= {*keys}

    def wait(self, keys: Sequence[str], timeout: timedelta = TIMEOUT) -> None:
        self._awaited(keys, timeout)

    def _awaited(self, keys: Sequence[str], timeout: timedelta) -> dict[str, str]:
        deadline = time.monotonic() + timeout.total_seconds()
        while not (values := self._read()).keys() >= {*keys}:
            if time.monotonic() > deadline:
                raise RuntimeError(f"Timed out after {timeout.total_seconds():g} seconds: {self._path} has no {keys}.")
            time.sleep(LOOK_S)
        return values

    @contextmanager
    def _writing(self) -> Iterator[float]:
        """Have the lock, which ends with this process; give the time by the file system's clock."""
        try:
            # Not through a link, by which another user could have put any file of ours there.
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(self._lock, flags, 0o600)) as lock:
                self._take(lock.fileno())
                try:
                    os.utime(lock.fileno())
                    yield os.fstat(lock.fileno()).st_mtime
                finally:
                    fcntl.flock(lock, fcntl.LOCK_UN)  # a process forked meanwhile has the file, and would have the lock
        except OSError as error:
            raise RuntimeError(str(error)) from error

    def _take(self, lock: int) -> None:
        """Take the lock, which others have for an instant."""
        deadline = time.monotonic() + LOCK_S
        while True:
            try:
                return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"another process has kept {self._lock} locked for {LOCK_S:g} seconds") from None
                time.sleep(LOOK_S / 4)

    def _read(self) -> dict[str, str]:
        try:
            with open_file(self._path) as file:
                text = file.read(MOST + 1) or b""
        except OSError as error:
            raise RuntimeError(str(error)) from error
        if not text.startswith(FIRST_LINE):
            raise RuntimeError(f"{self._path} is another file, in which no nodes have met")
        try:
            values = json.loads(text.removeprefix(FIRST_LINE))
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict) or not all(isinstance(value, str) for value in values.values()):
            raise RuntimeError(f"{self._path} is damaged, or somebody else writes there")
        return values

    def _write(self, values: dict[str, str]) -> None:
        text = FIRST_LINE + json.dumps(values).encode()
        write_aside(self._path, lambda file: file.write(text), durable=False)
