"""The one directory of a run. Rank 0 opens it once all ranks have agreed to start; importing this loads no torch."""

import errno
import fcntl
import json
import logging
import math
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ddp_recipes.errors import RequestError
from ddp_recipes.runtime.files import LACKING, read_text, write_aside, write_over

Summary = dict[str, Any]

log = logging.getLogger(__name__)


class RunDirectory:
    """Hold the lock of a run directory, and write its records.

    Args:
        path: the directory.
        resumed: whether the run goes on with what an earlier one left there.

    Raises:
        RequestError: another run is writing there, or one has been and this run does not go on with it.
    """

    def __init__(self, path: Path, resumed: bool) -> None:
        refuse_used(path, resumed)
        path.mkdir(parents=True, exist_ok=True)
        _refuse_links(path)
        _refuse_own_code(path)
        self.path = path
        self._lock = _lock(path)
        shutil.rmtree(path / "ranks", ignore_errors=True)  # of an earlier start that failed

    def record(self, config: str, hydra: Mapping[str, str]) -> None:
        """Write ``config.yaml``, what every rank runs with, and Hydra's own record, by file names."""
        for name, text in hydra.items():
            write_text(self.path / ".hydra" / name, text, durable=False)
        write_text(self.path / "config.yaml", config)

    def close(self) -> None:
        """Release the lock."""
        os.close(self._lock)


def _refuse_links(path: Path) -> None:
    """Refuse a run directory in which links lead what is written elsewhere: a log would be added to any file."""
    for inside in path.iterdir():
        if inside.is_symlink() and (inside.lstat().st_uid not in (0, os.geteuid()) or inside.name == "train.log"):
            raise RequestError(
                f"{inside} is a symbolic link to {os.readlink(inside)}, which a run would write to. Remove it, or "
                f"choose another hydra.run.dir; ckpt_path={path} reads the checkpoints from there."
            )


def _refuse_own_code(path: Path) -> None:
    """Refuse a folder of the user's own modules as run directory: no later run would import them from there."""
    imported = path.resolve() in (Path(folder).resolve() for folder in sys.path)
    own = (*path.glob("*.py"), *path.glob("*/__init__.py")) if imported else ()
    if own and not (path / "config.yaml").exists():
        raise RequestError(
            f"hydra.run.dir={path} is where your own modules are ({own[0].relative_to(path)}), and nothing is imported "
            f"from a run directory: the run may be somebody else's. Choose another, such as {path / 'run'}."
        )


def _lock(path: Path) -> int:
    """Return the lock of a directory, made if need be: on the folder itself, so it leaves no file and ends with us."""
    while True:
        path.mkdir(parents=True, exist_ok=True)
        lock = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock), os.stat(path)):
                return lock
        except FileNotFoundError:  # who made it has removed it meanwhile
            pass
        except OSError as error:
            if error.errno in LACKING:
                log.warning("%s cannot be locked (%s): see to it that one run alone uses it.", path, error.strerror)
                return lock
            os.close(lock)
            raise RequestError(
                f"{path} is in use by a run that is still going. Wait for it, or choose another hydra.run.dir."
            ) from None
        os.close(lock)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a run directory, which the run in it has as long as it goes.

    Raises:
        RequestError: another process has it.
    """
    lock = _lock(path)
    try:
        yield
    finally:
        os.close(lock)


def refuse_used(path: Path, resumed: bool) -> None:
    """Refuse a directory that holds a run, unless this run goes on with it.

    Raises:
        RequestError: says how to go on with that run, and how to start another one.
    """
    if (path / "config.yaml").exists() and not resumed:
        raise RequestError(
            f"{path} already holds a run. To go on with it, use ckpt_path=auto; to start another one, choose another "
            f"hydra.run.dir (left out, every run gets a directory of its own). To evaluate its checkpoint, leave "
            f"hydra.run.dir out and use ckpt_path={path}."
        )


def write_summary(path: Path, summary: Summary, durable: bool = True) -> None:
    """Write ``summary.json``, complete or not at all; what is not finite, which JSON does not have, becomes null.

    Where the disk is full, in the place of the one that is there, which says that the run goes on.
    """
    text = json.dumps(_finite(summary), indent=2, allow_nan=False, default=str) + "\n"
    try:
        write_text(path / "summary.json", text, durable)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not write_over(path / "summary.json", text.encode()):
            raise


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_summary(directory: Path) -> Summary | None:
    """Return a run's summary, "running" if it has not ended; ``None`` if what is there is no summary."""
    try:
        found = json.loads(read_text(directory / "summary.json"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("status"), str):
        return None
    texts, numbers = found.get("overrides", []), (found.get("objective"), found.get("wall_time_s"))
    fits = isinstance(texts, list) and all(isinstance(text, str) for text in texts)
    return found if fits and all(map(_is_number, numbers)) else None


def _is_number(value: object) -> bool:
    """Return whether a value is null, or a number that can be shown."""
    return value is None or (isinstance(value, int | float) and abs(value) < 1e300)


@contextmanager
def recording(what: str = "A log") -> Iterator[None]:
    """Write a record of how a run ended where that can be written: it must not take the place of why the run ended."""
    try:
        yield
    except OSError as error:
        path = os.fsdecode(error.filename or what)
        print(f"{path} was not written: {error.strerror}.", file=sys.stderr, flush=True)


@recording()
def leave_summary(
    directory: Path, error: str, overrides: Sequence[str], known_better: bool = False, status: str = "failed"
) -> None:
    """Write that a run failed if rank 0 has not: it was the one that died, or the run never began.

    Args:
        known_better: rank 0 saw no more than a consequence (a broken connection): ``error`` replaces what it wrote.
    """
    written = read_summary(directory) or {"overrides": list(overrides)}
    if directory.is_dir() and (known_better or written.get("status", "running") == "running"):
        write_summary(directory, {**written, "status": status, "error": error})


def leave_failure(
    directory: Path, overrides: Sequence[str], error: str, known_better: bool = False, status: str = "failed"
) -> None:
    """Write that a run failed, or was preempted, if it began; one that did not leaves nothing."""
    if (directory / "config.yaml").exists():
        leave_summary(directory, error, overrides, known_better, status)


def leave_failure_of_rank_0(directory: Path, overrides: Sequence[str], error: str, known_better: bool = False) -> None:
    """Write that a run failed if its rank 0 no longer can: as long as it lives, it holds the lock of the directory."""
    if (directory / "config.yaml").exists():
        with suppress(RequestError), locked(directory):
            leave_summary(directory, error, overrides, known_better)


@recording()
def write_trace(directory: Path, rank: int, text: str) -> None:
    """Write a rank's traceback to ``ranks/``."""
    in_ranks(directory, f"rank_{rank}.txt").write_text(text, encoding="utf-8")


@recording()
def write_flight_recorder(directory: Path, rank: int, content: bytes) -> None:
    """Write which collectives a rank was in last to ``ranks/``, as JSON."""
    if content:
        in_ranks(directory, f"flight_recorder_{rank}.json").write_bytes(content)


def in_ranks(directory: Path, name: str) -> Path:
    """Return where something is left after a failure; the folder is there."""
    folder = directory / "ranks"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / name


def leave_trace(directory: Path, rank: int, text: str) -> None:
    """Write that of a rank that is about to be killed, if there is any and the run began."""
    if text and (directory / "config.yaml").exists():
        write_trace(directory, rank, text)


def write_text(path: Path, text: str, durable: bool = True) -> None:
    """Write a small file, complete or not at all."""
    write_aside(path, lambda file: file.write(text.encode()), durable=durable)
