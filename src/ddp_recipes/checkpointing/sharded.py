"""Checkpoints that several ranks write together, each the rows it has; see :mod:`ddp_recipes.checkpointing.parts`."""

import json
import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

from torch import Tensor

from ddp_recipes.checkpointing.files import INDEX, State
from ddp_recipes.checkpointing.manager import Background, Checkpointer, FileCheckpointer
from ddp_recipes.checkpointing.parts import Part, PieceWriter, file_of, index, size_in_file, taken_apart
from ddp_recipes.checkpointing.writing import unwritable
from ddp_recipes.config.settings import CheckpointSettings
from ddp_recipes.errors import RecipeError
from ddp_recipes.runtime.files import write_aside
from ddp_recipes.runtime.tensors import OwnRows

LOOK_S = 0.01  # between looks at what other ranks have written
STILL_S = 1.0  # without a byte more of what others write: they are gone, or nobody would wait so
VISIBLE_S = 70.0  # until another node's files are seen, longer than NFS keeps what it knows of a folder


@dataclass(frozen=True)
class Writers:
    """The ranks that write checkpoints together.

    Attributes:
        rank: this one.
        ranks: how many, from rank 0 on.
        start: 8 hexadecimal digits that no other start of the run has.
    """

    rank: int
    ranks: int
    start: str

    def files(self, directory: Path, step: int) -> list[Path]:
        """Return the parts of a checkpoint, rank by rank."""
        folder = directory / f"step_{step:08d}-{self.start}"
        return [folder / file_of(rank, self.ranks) for rank in range(self.ranks)]

    def check(self, directory: Path) -> None:
        """See that this rank's checkpoints come to lie where rank 0's do.

        Raises:
            RecipeError: they do not.
        """
        deadline = time.monotonic() + VISIBLE_S
        while not _mark(directory, self.start).exists():
            if time.monotonic() > deadline:
                raise RecipeError(
                    f"Rank {self.rank} does not see {directory} as rank 0 does. Ranks write a sharded model's "
                    f"checkpoint together: hydra.run.dir has to be on a file system that all nodes share."
                )
            time.sleep(LOOK_S)


def begin(directory: Path) -> str:
    """Return the name of a new start, after which :meth:`Writers.check` finds the folder of its checkpoints."""
    start = secrets.token_hex(4)
    directory.mkdir(parents=True, exist_ok=True)
    _mark(directory, start).touch()
    return start


def _mark(directory: Path, start: str) -> Path:
    return directory / f".{start}.part"  # the first save removes it


class PartWriter:
    """Writes this rank's part of each checkpoint, then a note beside it of what rank 0 needs to know for the index."""

    def __init__(self, directory: Path, writers: Writers) -> None:
        self._directory, self._writers = directory, writers
        self._pieces = PieceWriter()

    def stage(
        self, step: int, tensors: Mapping[str, Tensor], rows: Mapping[str, OwnRows], snapshot: bool
    ) -> Callable[[], None]:
        """Return what writes the part; after a ``snapshot`` the tensors may change before that.

        Raises:
            RecipeError: there is no room for all parts.
        """
        path = self._writers.files(self._directory, step)[self._writers.rank]
        held = {name: own.values for name, own in rows.items() if len(own.values)}
        size = sum(map(size_in_file, (*tensors.values(), *held.values())))
        with unwritable(path, size):
            _refuse_full(path, sum(own.shape.numel() * own.values.dtype.itemsize for own in rows.values()))
        write = self._pieces.stage({**tensors, **held}, size, snapshot)
        spans = {name: [rows[name].start, rows[name].start + len(values)] for name, values in held.items()}

        def commit() -> None:
            with unwritable(path, size):
                written: list[tuple[int, int]] = []
                write_aside(path, lambda file: written.append(write(file)))
                note = json.dumps([*written[0], spans]).encode()
                write_aside(_note(path), lambda file: file.write(note), durable=False)

        return commit


def _note(part: Path) -> Path:
    return part.with_suffix(".json")


def _refuse_full(path: Path, size: int) -> None:
    """Refuse a checkpoint before anything of it is written if its disk has no room; what there is of it is counted."""
    directory = path.parent.parent
    directory.mkdir(parents=True, exist_ok=True)
    path.parent.mkdir(exist_ok=True)
    if size > (free := shutil.disk_usage(directory).free) + bytes_in(path.parent):
        raise RecipeError(
            f"{path.parent} is not written: it needs about {size:,} bytes; free on that disk: {free:,}. Earlier "
            f"checkpoints are untouched. Make room, or choose a larger disk: hydra.run.dir."
        )


def bytes_in(folder: Path) -> int:
    """Return the bytes of parts that are there, whole or not."""
    there = 0
    for each in folder.iterdir():
        with suppress(FileNotFoundError):  # others write and rename
            there += each.stat().st_size
    return there


class PartCheckpointer(Background):
    """Writes the parts of a rank that is not rank 0."""

    def __init__(self, directory: Path, settings: CheckpointSettings, writers: Writers) -> None:
        super().__init__(directory, settings)
        self._part = PartWriter(directory, writers)

    def save(self, state: State, step: int, value: float | None) -> None:
        """Begin to write this rank's rows."""
        self.wait(None)
        _, _, rows = taken_apart(state)
        self._begin(self._part.stage(step, {}, rows, self.settings.async_save))


class ShardedCheckpointer(FileCheckpointer):
    """Writes rank 0's part, and the index once all parts are there; keeps and deletes as :class:`FileCheckpointer`."""

    suffix = INDEX

    def __init__(self, directory: Path, settings: CheckpointSettings, writers: Writers) -> None:
        super().__init__(directory, settings)
        self._writers, self._part = writers, PartWriter(directory, writers)
        self._awaited: Sequence[Path] = ()  # parts for whose notes the index has to wait
        self._publish: Callable[[], None]
        self._alone_since: float | None = None  # when this rank began to wait for what others say they have written

    def save(self, state: State, step: int, value: float | None) -> None:
        """Begin to write this rank's rows and what is not dealt."""
        self.wait(None)
        kept = self._kept(step, value)
        tree, tensors, rows = taken_apart({**state, "checkpointer": self.state()})
        self._begin(self._part.stage(step, tensors, rows, self.settings.async_save))
        self._awaited, self._alone_since = self._writers.files(self.directory, step), None
        self._publish = partial(self._publish_all, self._awaited, tree, rows, step, kept)

    def wait(self, timeout: float | None) -> bool:
        """Wait so many seconds for this rank's part, or for the index; the others' parts are only looked at."""
        if super().wait(timeout):
            return True
        if timeout is None:
            self._wait_for_parts()
        if not self._awaited:
            return False
        if missing := self._missing():
            if self._alone_since is not None and time.monotonic() - self._alone_since > VISIBLE_S:
                raise RecipeError(
                    f"Rank 0 does not see what other ranks have written: {', '.join(map(str, missing[:4]))}."
                )
            Event().wait(min(timeout or 0.0, LOOK_S))
            return True
        self._awaited = ()
        self._begin(self._publish)
        return super().wait(timeout)

    def _missing(self) -> list[Path]:
        """Return the parts that are not there yet."""
        return [path for path in self._awaited if not _note(path).exists()]

    def _wait_for_parts(self) -> None:
        """Wait for the others' parts as long as something of them comes: whoever writes one may be gone."""
        known, since = 0, time.monotonic()
        while missing := self._missing():
            there = bytes_in(missing[0].parent)
            if there != known:
                known, since = there, time.monotonic()
            elif time.monotonic() > since + STILL_S:
                self.others_are_lost()
            time.sleep(LOOK_S)

    def others_are_done(self) -> None:
        """Expect what they have written."""
        self._alone_since = self._alone_since or time.monotonic()

    def others_are_lost(self) -> None:
        """Leave a checkpoint without an index whose parts they were writing."""
        self._awaited = ()

    def _publish_all(
        self, paths: Sequence[Path], tree: Any, rows: Mapping[str, OwnRows], step: int, kept: list[int]
    ) -> None:
        """Write and link the index of parts that are all there, then prune."""
        parts = []
        for rank, path in enumerate(paths):
            size, checksum, spans = json.loads(_note(path).read_bytes())
            parts.append(Part(path.name, rank, size, checksum, spans))
        content = index(paths[0].parent.name, tree, rows, parts)
        self._commit(lambda file: file.write(content), len(content), step, kept)
        for path in paths:
            _note(path).unlink(missing_ok=True)


def make_checkpointer(directory: Path, settings: CheckpointSettings, writers: Writers) -> Checkpointer:
    """Return what writes a rank's part of checkpoints, and on rank 0 their index."""
    if writers.rank >= writers.ranks:
        return Checkpointer()
    return (ShardedCheckpointer if writers.rank == 0 else PartCheckpointer)(directory, settings, writers)
