"""The index of a checkpoint in parts, as far as the folder tells it from other files: which parts it names.

The index is ``step_<8 digits>.json`` (``.pt`` in runs of earlier versions). Its parts are in a folder beside it, whose
name has a part that differs from start to start: no save writes into the files of another one. What is in parts:
:mod:`ddp_recipes.checkpointing.parts`.
"""

import json
import re
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ddp_recipes.runtime.files import open_file

FOLDER = re.compile(r"step_\d{8,}-[0-9a-f]{8}")
Verify = Callable[[Sequence[Callable[[], str | None]]], Sequence[str | None]]


class DamagedParts(ValueError):
    """What is wrong with an index or with a part."""


def is_index(path: Path) -> bool:
    """Whether a file is an index: a zip file begins otherwise."""
    with open_file(path) as file:
        return file.read(1) == b"{"


def folder_of(path: Path) -> Path | None:
    """Return the folder with the parts of a checkpoint; ``None`` where it is a file of its own, or damaged."""
    try:
        return path.parent / str(read_index(path)["folder"]) if is_index(path) else None
    except DamagedParts:
        return None


def abandoned(directory: Path) -> list[Path]:
    """Return the folders in which a save that was killed left parts, or a deletion: no index names them."""
    found = [path for path in directory.iterdir() if FOLDER.fullmatch(path.name)]
    files = (path for pattern in ("*.pt*", "*.json*") for path in directory.glob(pattern) if found and path.is_file())
    indices = [path for path in files if is_index(path)]
    folders = [folder_of(path) for path in indices]
    return [] if None in folders else [path for path in found if path not in folders]  # a damaged one may name any


def read_index(path: Path) -> dict[str, Any]:
    """Return what an index says, its own checksum with it.

    Raises:
        DamagedParts: it is damaged.
    """
    with open_file(path) as whole:
        text = whole.readall()
    try:
        file = json.loads(text)
        content: dict[str, Any] = file["content"]
        right = file["checksum"] == checksum_of(text.partition(b'"content": ')[2][:-1])
        if right and FOLDER.fullmatch(content["folder"]) is None:
            raise DamagedParts("it names no folder of a checkpoint")
    except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise DamagedParts(f"it is no whole index of a checkpoint in parts ({type(error).__name__})") from None
    if not right:
        raise DamagedParts("its content does not match its checksum")
    return {**content, "checksum": file["checksum"]}


def checksum_of(text: bytes) -> str:
    """Return the CRC-32 of an index's content, as the index has it."""
    return f"{zlib.crc32(text):08x}"


def verify_here(checks: Sequence[Callable[[], str | None]]) -> list[str | None]:
    """Return what checks of parts return, which are all made in this process."""
    return [check() for check in checks]
