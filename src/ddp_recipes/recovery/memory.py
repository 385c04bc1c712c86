"""States of ranks in memory that another process holds: what is left where all ranks are lost. Loads no torch.

A state lies in a file without a name. It begins with what it is, which is written last: a file whose writer died
halfway holds nothing.
"""

import os
import struct
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

from ddp_recipes.recovery.source import Candidate, Source, furthest

HEADER = struct.Struct("<QQII16s")  # step, bytes that follow, part, parts, start


class SnapshotId(NamedTuple):
    """The identity of a state that is kept in memory: its step, and which part of the model.

    Attributes:
        step: after which it was.
        part: of the model.
        parts: how many make up the model.
        start: of the ranks, by a name of 16 characters at most: parts of two starts do not go together.
    """

    step: int
    part: int = 0
    parts: int = 1
    start: str = ""

    @classmethod
    def of(cls, header: bytes) -> "SnapshotId | None":
        """Return what a header says, ``None`` without a whole state behind it."""
        step, length, part, parts, start = HEADER.unpack(header)
        return cls(step, part, parts, start.rstrip(b"\0").decode()) if length else None


@dataclass(frozen=True)
class SnapshotSlots:
    """Where states of a run are kept: of each part of the model two files, so that one is whole while one is written.

    Attributes:
        paths: by part, which any process of this user can open while this one lives.
    """

    paths: tuple[tuple[str, str], ...]

    @classmethod
    def made(cls, parts: int, stack: ExitStack) -> "SnapshotSlots":
        """Return slots in this process's memory, until the stack ends."""
        paths = [path_of(new_file(stack)) for _ in range(2 * parts)]
        return cls(tuple(zip(paths[::2], paths[1::2], strict=True)))

    def each(self) -> list[tuple[SnapshotId, str]]:
        """Return what each state is, and its place."""
        return [(snapshot, path) for pair in self.paths for path in pair if (snapshot := snapshot_in(path)) is not None]

    def newest(self) -> Source[int, str] | None:
        """Return the last step at which every part was kept, and where."""
        return furthest(
            Candidate(snapshot.step, part, len(self.paths), path)
            for part, pair in enumerate(self.paths)
            for path in pair
            if (snapshot := snapshot_in(path)) is not None
        )


def new_file(stack: ExitStack) -> int:
    """Return the descriptor of a file in this process's memory, which holds no state; the stack closes it."""
    file = stack.enter_context(os.fdopen(os.memfd_create("ddp_recipes"), "rb")).fileno()
    os.truncate(file, HEADER.size)
    return file


def path_of(file: int) -> str:
    """Return the path by which any process of this user opens a file of this one."""
    return f"/proc/{os.getpid()}/fd/{file}"


def snapshot_in(path: str) -> SnapshotId | None:
    """Return what the state in a file is, ``None`` without a whole one."""
    with open(path, "rb") as file:
        return SnapshotId.of(file.read(HEADER.size))


def least(paths: Iterable[str], new: SnapshotId) -> str:
    """Return the place to write a new state over: ranks may be reading the newest of the steps before it.

    What is of a later step was cut off before all parts were there.
    """

    def worth(path: str) -> tuple[object, ...]:
        snapshot = snapshot_in(path)
        return (0,) if snapshot is None else (1, snapshot.step <= new.step, snapshot.step, snapshot.start == new.start)

    return min(paths, key=worth)


def write_state(file: BinaryIO, snapshot: SnapshotId, pieces: Iterable[bytes | memoryview]) -> None:
    """Write a state over what the file holds."""
    file.write(bytes(HEADER.size))
    file.flush()
    length = sum(map(file.write, pieces))
    file.truncate()
    file.seek(0)
    file.write(HEADER.pack(snapshot.step, length, snapshot.part, snapshot.parts, snapshot.start.encode()))
    file.flush()
