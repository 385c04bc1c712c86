"""States in a node's memory: its ranks' own, and copies of another node's, which go on where that one is lost."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from ddp_recipes.errors import RunFailed
from ddp_recipes.recovery.memory import (
    HEADER,
    SnapshotId,
    SnapshotSlots,
    least,
    new_file,
    path_of,
    snapshot_in,
    write_state,
)
from ddp_recipes.recovery.memory_server import CHUNK, MemoryClient, MemoryServer

LOOK_S = 0.1  # between looks at what is new on the other node
WARN_S = 30.0  # without a copy


class Held(NamedTuple):
    """A state that a node has, its own or a copy.

    Attributes:
        file: descriptor, in the supervisor's process.
        snapshot: what it is.
    """

    file: int
    snapshot: SnapshotId


class Overtaken(Exception):
    """A state was written over while it was copied."""


class Copies:
    """What a node has of the states of a run, which it serves to the others until the stack ends."""

    def __init__(self, slots: SnapshotSlots, address: str, key: bytes, stack: ExitStack) -> None:
        self._key, self._stack = key, stack
        self.own = tuple(int(path.rpartition("/")[2]) for pair in slots.paths for path in pair)
        self._copied: dict[int, tuple[int, int]] = {}  # files, by the other node's rank
        self.port = stack.enter_context(MemoryServer(address, key, self._files)).port

    def _files(self) -> list[int]:
        return [*self.own, *(file for pair in list(self._copied.values()) for file in pair)]

    def held(self) -> tuple[Held, ...]:
        """Return each whole state."""
        return tuple(
            Held(file, snapshot) for file in self._files() if (snapshot := snapshot_in(path_of(file))) is not None
        )

    @contextmanager
    def following(self, host: str, port: int, files: tuple[int, ...], start: str) -> Iterator[None]:
        """Copy from another node what its ranks keep in a start, as it comes.

        Args:
            files: where, two for each of its ranks.
        """
        client, over = MemoryClient(host, port, self._key), threading.Event()
        pairs = list(zip(files[::2], files[1::2], strict=True))
        thread = threading.Thread(target=self._follow, args=(client, pairs, start, over), daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            client.close()
            thread.join()  # what it writes is whole, or counts as nothing

    def _follow(self, client: MemoryClient, pairs: list[tuple[int, int]], start: str, over: threading.Event) -> None:
        since, warned = time.monotonic(), False
        while not over.wait(LOOK_S):
            try:
                self._copy_newest(client, pairs, start)
                since = time.monotonic()
            except (OSError, Overtaken, RunFailed) as error:
                if not (warned or over.is_set()) and time.monotonic() > since + WARN_S:
                    warned = True
                    print(
                        f"For {WARN_S:g} s no state in memory of node {client.host} has been copied: {error}.",
                        file=sys.stderr,
                        flush=True,
                    )

    def _copy_newest(self, client: MemoryClient, pairs: list[tuple[int, int]], start: str) -> None:
        """Copy the states of the last step that all ranks of the other node have kept, unless they are here."""
        of_ranks: dict[int, dict[int, tuple[int, bytes]]] = {}  # by rank and step
        for rank, pair in enumerate(pairs):
            for file in pair:
                header = _header(client, file)
                if (snapshot := SnapshotId.of(header)) is not None and snapshot.start == start:
                    of_ranks.setdefault(rank, {})[snapshot.step] = file, header
        steps = set.intersection(*map(set, of_ranks.values())) if of_ranks else set()
        here = {held.snapshot for held in self.held()}
        for rank, of_rank in of_ranks.items() if steps else ():
            file, header = of_rank[max(steps)]
            snapshot = SnapshotId.of(header)
            if snapshot is not None and snapshot not in here:
                with open(least(self._slots(rank), snapshot), "r+b") as place:
                    write_state(place, snapshot, _content(client, file, header))

    def _slots(self, rank: int) -> list[str]:
        """Return where to copy the states of a rank of the other node."""
        if rank not in self._copied:
            self._copied[rank] = (new_file(self._stack), new_file(self._stack))
        return [path_of(file) for file in self._copied[rank]]


def _header(client: MemoryClient, file: int) -> bytes:
    client.read(file, 0, memoryview(header := bytearray(HEADER.size)))
    return bytes(header)


def _content(client: MemoryClient, file: int, header: bytes) -> Iterator[memoryview]:
    """Yield what follows a header, and raise unless it was the same until the end."""
    end = HEADER.size + HEADER.unpack(header)[1]
    for at in range(HEADER.size, end, CHUNK):
        client.read(file, at, piece := memoryview(bytearray(min(CHUNK, end - at))))
        yield piece
    if _header(client, file) != header:
        raise Overtaken("ranks write the next but one before it is here: keep states of fewer steps")
