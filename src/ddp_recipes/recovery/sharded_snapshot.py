"""A rank's part of a sharded model's state, kept in memory: any number of ranks read it, as a checkpoint in parts."""

import io
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ddp_recipes.checkpointing.files import State
from ddp_recipes.checkpointing.parts import PartFile, dealt, restored, taken_apart
from ddp_recipes.checkpointing.writing import NAMES, stream
from ddp_recipes.recovery.memory import HEADER

_LENGTH = 8  # bytes that hold the length of the JSON


def pieces_of(state: State, part: int) -> Iterator[bytes | memoryview]:
    """Yield what a rank keeps of a state: its rows and, of the first part, all that is not dealt."""
    tree, tensors, rows = taken_apart(state)
    note = {
        "state": tree if part == 0 else None,
        "drawn": state["drawn"],
        "rows": {
            name: [NAMES[own.values.dtype], [*own.shape], own.start, own.start + len(own.values)]
            for name, own in rows.items()
        },
    }
    text = json.dumps(note).encode()
    yield len(text).to_bytes(_LENGTH, "little") + text
    held = {name: own.values for name, own in rows.items() if len(own.values)}
    yield from stream({**(tensors if part == 0 else {}), **held})


def load_snapshot(slots: Sequence[str], opened: Callable[[str], io.RawIOBase]) -> State:
    """Return the state whose parts are in these slots: what is sharded is read once it is requested."""
    notes: list[dict[str, Any]] = []
    files: list[PartFile] = []
    for part, place in enumerate(slots):
        with opened(place) as file:
            _, content, *_ = HEADER.unpack(file.read(HEADER.size) or b"")
            size = int.from_bytes(file.read(_LENGTH) or b"", "little")
            notes.append(json.loads(file.read(size) or b""))
        tensors, begin = content - _LENGTH - size, HEADER.size + _LENGTH + size
        files.append(PartFile(Path(place), part, tensors, 0, begin, partial(opened, place)))
    rows = {
        name: {
            "dtype": dtype,
            "shape": shape,
            "at": [[part, *note["rows"][name][2:]] for part, note in enumerate(notes) if name in note["rows"]],
        }
        for name, (dtype, shape, *_) in notes[0]["rows"].items()
    }
    state: State = restored(notes[0]["state"], dealt(rows, files), files)
    return {**state, "drawn": [drawn for note in notes for drawn in note["drawn"]]}
