"""Who started this process: torchrun, mpirun or srun, and the key by which ranks know each other. Loads no torch.

Each has its own names for rank and size; here they become torchrun's.
"""

import os
import secrets
import socket
import tempfile
import time
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from ddp_recipes.config.extras import extra
from ddp_recipes.errors import RequestError
from ddp_recipes.runtime.files import open_file, read_text
from ddp_recipes.runtime.process import started_at
from ddp_recipes.runtime.world import World, whole_numbers

# The names of Open MPI's mpirun; those of MPICH's and Intel MPI's.
_MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
_FIRST_PORT, _PORTS = 10_000, 20_000  # below the ports that systems assign by themselves


def join(environ: MutableMapping[str, str]) -> World | None:
    """Return this process's place among those that something started together, or ``None`` if it was started alone.

    Torchrun's variables are set in ``environ`` where they were not.

    Raises:
        RequestError: the variables are incomplete or contradict each other, the first host has no address, or there is
            no such port.
    """
    variables = translate(environ)
    if variables is None:
        return None
    environ.update(variables)
    world = World.from_env(environ)
    if world.world_size > 1:
        _refuse_unknown_host(environ["MASTER_ADDR"])
        _refuse_unknown_port(environ["MASTER_PORT"])
    return world


def translate(environ: Mapping[str, str]) -> dict[str, str] | None:
    """Return torchrun's variables for this process, or ``None`` if it was started alone."""
    if "RANK" in environ or "LOCAL_RANK" in environ:
        return {}  # by torchrun, or by what uses its names
    for names in _MPI:
        if all(name in environ for name in names):
            return _of_mpirun(names, environ)
    found: dict[str, str] | None = extra("a step of Slurm")(environ) if "SLURM_STEP_ID" in environ else None
    if found is None and "WORLD_SIZE" in environ:  # which a batch script may set for what it starts
        return {}
    return found


def tasks(environ: Mapping[str, str]) -> int:
    """Return how many processes, with this one, something other than torchrun started together."""
    return int((translate(environ) or {}).get("WORLD_SIZE", 1))


def _of_mpirun(names: tuple[str, ...], environ: Mapping[str, str]) -> dict[str, str]:
    with whole_numbers(*names):
        rank, size, local_rank, local_size = (int(environ[name]) for name in names)
    world = World.of(rank, size, local_rank, local_size)
    if size != local_size and not ("MASTER_ADDR" in environ and "MASTER_PORT" in environ):
        raise RequestError(
            f"mpirun started {size} ranks on several hosts, and MPI does not say where rank 0 is. Give every rank the "
            f"same address and a free port there: mpirun -x MASTER_ADDR=<first host> -x MASTER_PORT=29500 … "
            f"(MPICH, Intel MPI: -genv MASTER_ADDR <first host> …)."
        )
    # On one host mpirun, or its one helper there, is the parent of all ranks, and of no others.
    return torchruns(environ, world, "127.0.0.1", os.getppid())


def torchruns(
    environ: Mapping[str, str], world: World, address: str, port: int, threads: str | None = None
) -> dict[str, str]:
    """Return torchrun's variables; those on where ranks meet, and on threads, stay where they are set."""
    threads = threads or str(max(1, len(os.sched_getaffinity(0)) // world.local_world_size))
    return {
        "RANK": str(world.rank),
        "WORLD_SIZE": str(world.world_size),
        "LOCAL_RANK": str(world.local_rank),
        "LOCAL_WORLD_SIZE": str(world.local_world_size),
        "GROUP_RANK": str(world.node_rank),
        "MASTER_ADDR": environ.get("MASTER_ADDR") or address,
        "MASTER_PORT": environ.get("MASTER_PORT") or str(_FIRST_PORT + port % _PORTS),
        "OMP_NUM_THREADS": environ.get("OMP_NUM_THREADS") or threads,
    }


def _refuse_unknown_host(host: str) -> None:
    """Refuse a first host without an address: torch would wait for it and print nothing."""
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        raise RequestError(
            f"The host of rank 0, MASTER_ADDR={host}, has no address here: {error.strerror}. Set MASTER_ADDR to a name "
            f"or an IP address under which every node reaches it."
        ) from None


def _refuse_unknown_port(port: str) -> None:
    """Refuse what is no port, which torch would take for a call of its own that is wrong."""
    if not (port.isdecimal() and 0 < int(port) < 1 << 16):
        raise RequestError(f"MASTER_PORT={port} is no port. Set one that is free on rank 0's host: 1 to 65535.")


KEY_VARIABLE = "DDP_RECIPES_KEY"
KEY_FILE = "~/.ddp_recipes_key"
_LEAST = 16  # characters
_DAY_S = 86_400
_MAKE = f"(umask 077; rm -f {KEY_FILE}; openssl rand -hex 32 > {KEY_FILE})"


def find_key(environ: Mapping[str, str]) -> bytes:
    """Return the key that the user's ranks have in common: of the environment, of a file at home, of torchrun's agent.

    Returns:
        Nothing where there is none.

    Raises:
        RequestError: it is too short, or others can read the file.
    """
    text = environ.get(KEY_VARIABLE) or _of_home() or _of_siblings(environ)
    if text and len(text) < _LEAST:
        raise RequestError(
            f"The key in {KEY_VARIABLE} or {KEY_FILE} is too short: give {_LEAST} characters at least. {_MAKE}"
        )
    return blake2b(text.encode()).digest() if text else b""


def _of_home() -> str:
    with suppress(OSError, RuntimeError), open_file(Path(KEY_FILE).expanduser()) as file:  # there need not be a home
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise RequestError(
                f"{KEY_FILE} has to be a file of this user that nobody else can read. Make a new key, for the old one "
                f"may be known: {_MAKE}"
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
