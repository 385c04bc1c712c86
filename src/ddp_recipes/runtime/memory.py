"""States of ranks in memory that another process holds: what is left where all ranks are lost. Loads no torch.

A state lies in a file without a name. It begins with its step and its length, which are written last: a file whose
writer died halfway holds nothing.
"""

import os
import struct
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import BinaryIO

HEADER = struct.Struct("<QQ")  # the step, and the bytes that follow


@dataclass(frozen=True)
class Places:
    """Where states of a run are kept: of each part of the model two files, so that one is whole while one is written.

    Attributes:
        paths: by part, which any process of this user can open while this one lives.
    """

    paths: tuple[tuple[str, str], ...]

    @classmethod
    def made(cls, parts: int, stack: ExitStack) -> "Places":
        """Return places in this process's memory, until the stack ends."""
        files = [stack.enter_context(os.fdopen(os.memfd_create("ddp_recipes"), "rb")) for _ in range(2 * parts)]
        paths = [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in files]
        return cls(tuple(zip(paths[::2], paths[1::2], strict=True)))

    def each(self) -> list[tuple[int, str]]:
        """Return the step and the place of each state."""
        return [(step, path) for pair in self.paths for path in pair if (step := step_in(path)) is not None]

    def newest(self) -> tuple[int, tuple[str, ...]] | None:
        """Return the last step at which every part was kept, and where."""
        found = [{step: path for path in pair if (step := step_in(path)) is not None} for pair in self.paths]
        steps = set.intersection(*map(set, found)) if found else set()
        return (step, tuple(of_part[step] for of_part in found)) if (step := max(steps, default=0)) else None


def step_in(path: str) -> int | None:
    """Return the step of the state in a file, ``None`` without a whole one."""
    with open(path, "rb") as file:
        header = file.read(HEADER.size)
    step, length = HEADER.unpack(header) if len(header) == HEADER.size else (0, 0)
    return step if length else None


def write_state(file: BinaryIO, step: int, pieces: Iterable[memoryview]) -> None:
    """Write a state over what the file holds."""
    file.write(bytes(HEADER.size))
    file.flush()
    length = sum(map(file.write, pieces))
    file.truncate()
    file.seek(0)
    file.write(HEADER.pack(step, length))
    file.flush()
