"""Shards on this machine: those of a store are fetched once a node, compressed ones decompressed once.

Plain files in one folder, shared by ranks and by runs. One process at a time fetches a shard, by a lock on a file
beside it; what it writes is renamed once it is complete and verified. A process that dies leaves a part, which the next
one that takes the lock removes. Who is about to open a shard shares the lock, and nobody removes the shard meanwhile.
"""

import errno
import fcntl
import hashlib
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from ddp_recipes.errors import RequestError
from ddp_recipes.streams.formats import compression_of, decompressed
from ddp_recipes.streams.reader import BadShard, needed

T = TypeVar("T")
LOOK_S = 0.2  # between looks at what a download has brought
FIRST_WAIT_S = 0.5  # before it is tried again; twice as long each time
PART = ".part"
LOCK = "lock"
_DIGITS = 24  # of the name of a shard's folder
# What stores call what tells a file from what it was before, the surest first.
_VERSIONS = (
    "ETag",
    "etag",
    "blob_id",
    "md5Hash",
    "Content-MD5",
    "Digest",
    "mtime",
    "Last-Modified",
    "LastModified",
    "created",
)


def without_query(path: str) -> str:
    """Return an address without what follows the file's name in it, such as a signature."""
    return path.partition("?")[0] if path.startswith(("http://", "https://")) else path


@dataclass(frozen=True)
class Cache:
    """A folder of shards.

    Attributes:
        limit: bytes that are kept; those used longest ago are removed. Each process that opens one may have one more.
        retries: how often a store that fails is asked again.
        timeout_s: how long a download may bring nothing.
        options: of the store, as fsspec takes them.
    """

    folder: Path
    limit: int = 64 << 30
    retries: int = 4
    timeout_s: float = 60.0
    options: tuple[tuple[str, Any], ...] = ()

    # --- shards ---

    @contextmanager
    def stored(self, path: str, checksum: str | None, size: int | None = None) -> Iterator[Path]:
        """Have the local file of a shard as it is stored; it is fetched where it is not here.

        Args:
            checksum: SHA-256 that it has to have.
            size: in bytes that it has to have.

        Raises:
            BadShard: it is missing, is another one, or the store does not give it.
        """
        if "://" not in path:
            yield Path(path)
            return
        which = f"{checksum} {size}" if checksum is not None else self._version(path)
        with self._once(f"{path} {which}", path, lambda part: self._fetch(path, part, checksum, size)) as file:
            yield file

    @contextmanager
    def plain(self, stored: Path, path: str) -> Iterator[Path]:
        """Have the file of a shard without its compression."""
        path = without_query(path)
        if not (suffix := compression_of(path)):
            yield stored
            return
        status = stored.stat()

        def decompress(part: Path) -> None:
            with stored.open("rb") as source, part.open("wb") as file:
                for chunk in decompressed(source, suffix):
                    file.write(chunk)

        name = f"{stored.absolute()} {status.st_size} {status.st_mtime_ns}"
        with self._once(name, path[: -len(suffix)], decompress) as file:
            yield file

    @contextmanager
    def _once(self, name: str, path: str, make: Callable[[Path], None]) -> Iterator[Path]:
        """Have a file that ``make`` has written, in this process or another one, now or before; it stays meanwhile."""
        file = self.folder / hashlib.sha256(name.encode()).hexdigest()[:_DIGITS] / Path(without_query(path)).name
        try:
            with ExitStack() as held:
                try:
                    while True:
                        held.enter_context(locked(file.parent / LOCK, fcntl.LOCK_SH))
                        if _touched(file):
                            break
                        held.close()
                        with locked(file.parent / LOCK, fcntl.LOCK_EX):
                            if not _touched(file):
                                self._made(file, make)
                except OSError as error:
                    if not _touched(file):  # else it is in a folder that may only be read
                        raise self._explained(error, path) from error
                yield file
        finally:
            _removed_if_empty(file.parent)  # it is, if that failed

    def _made(self, file: Path, make: Callable[[Path], None]) -> None:
        for left in file.parent.glob(f"*{PART}"):  # of a process that died, for nobody else has the lock
            left.unlink()
        part = file.with_name(f"{file.name}.{os.getpid()}{PART}")
        try:
            try:
                make(part)
            except OSError as error:
                if error.errno != errno.ENOSPC or not self.evict(0):
                    raise
                make(part)  # with all others gone
            part.rename(file)
        finally:
            part.unlink(missing_ok=True)
        self.evict(self.limit, keep=file)

    def _explained(self, error: OSError, path: str) -> BadShard:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return BadShard(
                f"there is no space left for it in data.cache.folder={self.folder}. Give a folder on a larger disk, or "
                f"free some space."
            )
        return BadShard(f"it cannot be kept in data.cache.folder={self.folder}: {error.strerror or error}")

    # --- space ---

    def evict(self, limit: int, keep: Path | None = None) -> int:
        """Remove files used longest ago until the rest has at most so many bytes; return how many were removed.

        Who has one open goes on reading it; what somebody is about to open stays.
        """
        found = []
        for file in self._files():
            with suppress(OSError):
                if file.name != LOCK and file.suffix != PART:
                    found.append((file.stat().st_atime_ns, file.stat().st_size, file))
        size, removed = sum(bytes_ for _, bytes_, _ in found), 0
        for _, bytes_, file in sorted(found):
            if size <= limit:
                break
            if file == keep:
                continue
            with suppress(BlockingIOError), locked(file.parent / LOCK, fcntl.LOCK_EX | fcntl.LOCK_NB):
                file.unlink(missing_ok=True)
                size -= bytes_
                removed += bytes_
            _removed_if_empty(file.parent)
        return removed

    def clean(self) -> None:
        """Remove what processes that died have left."""
        for file in self._files():
            if file.suffix == PART:
                with suppress(OSError), locked(file.parent / LOCK, fcntl.LOCK_EX | fcntl.LOCK_NB):
                    file.unlink(missing_ok=True)
            if file.suffix == PART or file.name == LOCK:
                _removed_if_empty(file.parent)

    def _files(self) -> list[Path]:
        """Return what lies in the folders of shards; there may be others beside them, which are not ours."""
        found: list[Path] = []
        for folder in self.folder.glob("[0-9a-f]" * _DIGITS):
            with suppress(OSError):  # another process has removed it just now
                found.extend(folder / name for name in os.listdir(folder))
        return found

    # --- stores ---

    def _fetch(self, path: str, part: Path, checksum: str | None, size: int | None) -> None:
        """Download a shard, and see that it is the one that was indexed."""

        tries = count()

        def attempt() -> None:
            store, inner = self._store(path)
            own = part.with_name(f"{next(tries)}.{part.name}")  # a try that was given up may go on writing to its own
            try:
                _in_time(lambda: store.get_file(inner, str(own)), own, self.timeout_s)
                if size is not None and (given := own.stat().st_size) != size:
                    how = "cut short" if given < size else "changed"
                    raise _Wrong(f"it is {how}: it came with {given:,} bytes, and had {size:,} when it was indexed")
                if checksum is not None and sha256(own) != checksum:
                    raise _Wrong("it has changed since it was indexed: its checksum is another one")
                own.rename(part)
            finally:
                own.unlink(missing_ok=True)

        self._tried(attempt, path)

    def _version(self, path: str) -> str:
        """Return what a store says of a shard without a checksum, which tells it from what it was in another run."""

        def attempt() -> str:
            store, inner = self._store(path)
            told = store.info(inner)  # of a listing there is more, or less, than of the file alone
            which = next((f"{name} {told[name]}" for name in _VERSIONS if told.get(name)), sorted(told.items()))
            return f"{told.get('size')} {which}"

        return self._tried(lambda: _in_time(attempt, None, self.timeout_s), path)

    def small_file(self, path: str) -> bytes | None:
        """Return the content of a small file in a store; None: there is none, or it is not for us.

        Raises:
            RequestError: the store does not give it.
        """

        def attempt() -> bytes | None:
            store, inner = self._store(path)
            try:
                found: bytes = store.cat_file(inner)
                return found
            except Exception as error:
                # Who may not list a store is refused what it has not, too.
                if isinstance(error, (FileNotFoundError, PermissionError)) or getattr(error, "status", None) == 403:
                    return None
                raise

        try:
            return self._tried(lambda: _in_time(attempt, None, self.timeout_s), path)
        except BadShard as error:
            raise RequestError(f"{path} cannot be read: {error}") from error

    def listing(self, root: str, names: Sequence[str] = ()) -> dict[str, int]:
        """Return names, relative to a folder of a store, and sizes of the files in it, or of some of them.

        Raises:
            RequestError: the store does not say.
        """

        def attempt() -> dict[str, int]:
            store, inner = self._store(root)
            base = inner.rstrip("/")
            found = store.find(inner, detail=True) if not names else {f"{base}/{name}": {} for name in names}
            sizes = {file: entry.get("size") for file, entry in found.items()}
            unknown = [file for file, size in sizes.items() if size is None]
            sizes.update(zip(unknown, _sizes(store, unknown), strict=True))
            return {file[len(base) :].lstrip("/"): int(size or 0) for file, size in sizes.items()}

        path = f"{root.rstrip('/')}/{names[0]}" if len(names) == 1 else root
        try:
            return self._tried(lambda: _in_time(attempt, None, self.timeout_s), path)
        except BadShard as error:
            what, advice = ("cannot be had", "") if names else ("cannot be listed", " Give it an index.")
            raise RequestError(f"data.path={path} {what}: {error}.{advice}") from error

    def put(self, path: str, content: bytes) -> None:
        """Write a small file to a store.

        Raises:
            RequestError: it cannot be written.
        """
        store, inner = self._store(path)
        try:
            self._tried(lambda: store.pipe_file(inner, content), path)
        except BadShard as error:
            raise RequestError(f"{path} cannot be written: {error}") from error

    def _store(self, path: str) -> tuple[Any, str]:
        """Return the store of an address, and what it calls it; a process has one of each."""
        try:
            store, inner = needed("fsspec.core").url_to_fs(path, **dict(self.options))
        except (ImportError, ValueError) as error:
            raise RequestError(f"data.path={path} is in a store that cannot be used: {error}") from error
        return store, inner

    def _tried(self, attempt: Callable[[], T], path: str) -> T:
        """Return what an attempt gives, or another one after it failed; some failures are for good."""
        wait = FIRST_WAIT_S
        for left in reversed(range(self.retries + 1)):
            try:
                return attempt()
            except PermissionError as error:
                raise BadShard(f"the store refuses it: {error}") from error
            except RequestError:
                raise
            except Exception as error:
                met = _met(error)
                if isinstance(met, FileNotFoundError):
                    raise BadShard(f"it is missing: the store has no {met.filename or path}") from error
                if isinstance(met, OSError) and met.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise
                if not left:
                    tries = f"{self.retries + 1} tries" if self.retries else "one try"
                    shown = f"{type(met).__name__}: {met}" if not isinstance(met, _Wrong) else str(met)
                    raise BadShard(f"{shown.rstrip('.')} ({tries}, data.cache.retries={self.retries})") from error
            time.sleep(wait)
            wait *= 2
        raise AssertionError


def _met(error: Exception) -> BaseException:
    """Return what a store met: to fsspec's of http a file whose size it cannot have is missing, whatever the reason."""
    cause: BaseException = error
    while isinstance(cause, FileNotFoundError) and cause.__cause__ is not None:
        cause = cause.__cause__
    of_http = type(cause).__module__.startswith("aiohttp") and getattr(cause, "status", None) not in (404, 410)
    return cause if of_http else error


class _Wrong(Exception):
    """What a store gave is not what was indexed."""


def _sizes(store: Any, files: Sequence[str]) -> Sequence[int | None]:
    """Return the sizes of files, asked for together; raise an error with the name of one that is missing."""
    try:
        sizes: Sequence[int | None] = store.sizes(files)
        return sizes
    except FileNotFoundError as error:
        missing = next((file for file in files if len(files) > 1 and not store.exists(file)), None)
        raise FileNotFoundError(errno.ENOENT, "it is missing", missing) from error


def _in_time(work: Callable[[], T], part: Path | None, timeout_s: float) -> T:
    """Return what a thread's work gives, unless that brings nothing for too long; the thread is left alone then.

    Args:
        part: the file that grows as it goes on.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised again by who waits
            outcome.set_exception(error)

    thread = threading.Thread(target=run, name="fetch", daemon=True)
    thread.start()
    seen, since = -1, time.monotonic()
    while not outcome.done():
        thread.join(LOOK_S if timeout_s > 1 else timeout_s / 5)
        size = part.stat().st_size if part is not None and part.exists() else 0
        if size != seen:
            seen, since = size, time.monotonic()
        elif not outcome.done() and time.monotonic() - since > timeout_s:
            raise TimeoutError(f"the store brought nothing for data.cache.timeout_s={timeout_s:g} seconds")
    return outcome.result()


def _touched(file: Path) -> bool:
    """Whether a file is here; if so it counts as used now. Its date stays, by which it is known once decompressed."""
    try:
        os.utime(file, ns=(time.time_ns(), file.stat().st_mtime_ns))
    except FileNotFoundError:
        return False
    except OSError:
        return file.exists()  # in a folder that may only be read
    return True


@contextmanager
def locked(path: Path, how: int) -> Iterator[None]:
    """Have a lock, whose file and folder are made; both may be removed by who has it, while others wait."""
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:
            with suppress(FileNotFoundError):  # it was removed just now
                if not stat.S_ISDIR(os.lstat(error.filename).st_mode):
                    raise FileExistsError(error.errno, "there is a file or a link to nowhere") from error
            continue
        try:
            file = path.open("w+")  # of network file systems a shared lock is for who reads
        except FileNotFoundError:  # the folder was removed just now
            continue
        with file:
            fcntl.flock(file, how)
            try:
                if not _is_at(file, path):  # it was removed meanwhile: another one may be there, and locked
                    continue
                yield
                return
            finally:
                fcntl.flock(file, fcntl.LOCK_UN)  # a process forked meanwhile has the file, and would have the lock


def _is_at(file: Any, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _removed_if_empty(folder: Path) -> None:
    """Remove the folder of a shard that has nothing but its lock, unless somebody is about to write there."""
    with suppress(OSError):
        if os.listdir(folder) != [LOCK]:
            return
        with locked(folder / LOCK, fcntl.LOCK_EX | fcntl.LOCK_NB):
            if os.listdir(folder) == [LOCK]:
                (folder / LOCK).unlink()
                folder.rmdir()


def sha256(path: Path) -> str:
    """Return the checksum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
