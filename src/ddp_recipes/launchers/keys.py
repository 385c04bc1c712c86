"""The key that proves who wrote a message, where others reach the store in which ranks meet. Loads no torch."""

import os
import secrets
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from ddp_recipes.errors import RequestError
from ddp_recipes.runtime.files import open_file, read_text
from ddp_recipes.runtime.process import started_at

VARIABLE = "DDP_RECIPES_KEY"
FILE = "~/.ddp_recipes_key"
_LEAST = 16  # characters
_DAY_S = 86_400
_MAKE = f"(umask 077; rm -f {FILE}; openssl rand -hex 32 > {FILE})"


def find_key(environ: Mapping[str, str]) -> bytes:
    """Return the key that the user's ranks have in common: of the environment, of a file at home, of torchrun's agent.

    Returns:
        Nothing where there is none.

    Raises:
        RequestError: it is too short, or others can read the file.
    """
    text = environ.get(VARIABLE) or _of_home() or _of_siblings(environ)
    if text and len(text) < _LEAST:
        raise RequestError(f"The key in {VARIABLE} or {FILE} is too short: give {_LEAST} characters at least. {_MAKE}")
    return blake2b(text.encode()).digest() if text else b""


def _of_home() -> str:
    with suppress(OSError, RuntimeError), open_file(Path(FILE).expanduser()) as file:  # there need not be a home
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise RequestError(
                f"{FILE} has to be a file of this user that nobody else can read. Make a new key, for the old one may "
                f"be known: {_MAKE}"
            )
        return file.readall().decode(errors="replace").strip()
    return ""


def _of_siblings(environ: Mapping[str, str]) -> str:
    """Return what the ranks find that one torchrun started, all on this machine: in a folder of the user's own."""
    if environ.get("LOCAL_WORLD_SIZE") != environ.get("WORLD_SIZE") or "TORCHELASTIC_RUN_ID" not in environ:
        return ""
    folder = Path(tempfile.gettempdir(), f"ddp_recipes_{os.geteuid()}")
    with suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        if status.st_uid != os.geteuid() or status.st_mode & 0o170077 != 0o040000:
            return ""  # somebody was there first
        for old in folder.iterdir():
            with suppress(FileNotFoundError):
                if old.stat().st_mtime < time.time() - _DAY_S:  # of a run that began long ago
                    old.unlink()
        agent = os.getppid()
        path = folder / f"key_{agent}_{started_at(agent)}"
        mine = folder / secrets.token_hex(8)
        mine.write_text(secrets.token_hex(32))
        with suppress(FileExistsError):
            os.link(mine, path)  # complete or absent
        mine.unlink()
        return read_text(path)
    return ""
