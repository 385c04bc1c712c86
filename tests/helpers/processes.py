"""Start runs as a user does, watch all of their processes, and wait for what must happen: never for a time to pass."""

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import termios
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helpers.patience import patience
from helpers.warm import CLIENT_FLAG, CLIENT_PID, warm

OWN_MODELS = Path(__file__).with_name("own_models.py")  # to be copied to the folder that a run is started from
TRAIN = str(Path(__file__).parents[2] / "train.py")
COLD = [sys.executable]  # what runs ``train.py`` where it matters who is whose parent
TORCHRUN = [str(Path(sysconfig.get_path("scripts")) / "torchrun"), "--nproc-per-node=2", "--standalone"]
COLD_TORCHRUN = [*COLD, *TORCHRUN]  # its ranks look for each other among the processes that their parent started
SMALL = ["data=random", "data.num_samples=400", "model=toy", "trainer.max_epochs=3", "hydra.run.dir=run"]
FAULTY = [*SMALL, "model._target_=own_models.Faulty"]
ENDLESS = [*SMALL, "model._target_=own_models.Slow", "trainer.max_epochs=100000", "checkpoint.every_n_steps=5"]
TWO = "launcher.nproc_per_node=2"
ONE_BY_ONE = [
    *(f"~data.train.{name}" for name in ("num_samples", "in_features", "out_features", "seed", "split")),
    "data.train._target_=own_models.OneByOne",
]
# On a quiet machine, as all time limits here:
GONE_S = 10.0  # what the contract gives a run to be gone, however it ended
START_S = 60.0  # for a run to import, start and do something
_MARK = "DDP_RECIPES_TEST_RUN"


@dataclass(frozen=True)
class Ended:
    """How a run ended and what it printed."""

    status: int
    out: str
    err: str


@dataclass(frozen=True)
class Run:
    """A run that is going on; every process of it carries a mark in its environment, also when it is an orphan."""

    process: subprocess.Popen[bytes]
    folder: Path
    mark: str

    def end(self, seconds: float = START_S) -> Ended:
        """Wait for the process that was started, then for all others, and return how it ended."""
        status = self.process.wait(patience(seconds))
        self.see_all_gone()
        out, err = ((self.folder / f"{self.mark}.{name}").read_text() for name in ("out", "err"))
        return Ended(status, out, err)

    def see_all_gone(self) -> None:
        """Fail unless every process of the run is gone within what the contract gives it."""
        until(lambda: not self.pids(), GONE_S, f"processes left: {self.pids()}")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process that was started, and to it alone."""
        kill(self.pid, number)

    @property
    def pid(self) -> int:
        """The process that was started, or that which one stands in for, once it is there."""
        stands_in = str(self.process.pid)
        for pid, _, environ in _processes():
            with suppress(ProcessLookupError):
                if environ.get(CLIENT_PID) == stands_in and os.getsid(pid) == pid:
                    return pid
        return self.process.pid

    def pids(self) -> dict[int, str | None]:
        """Return the living processes of the run, with the rank of each that has one."""
        return {
            pid: name.removeprefix("rank ") if name.startswith("rank ") else environ.get("RANK")
            for pid, name, environ in _processes()
            if environ.get(_MARK) == self.mark
        }

    @property
    def fork_server(self) -> int:
        """The process that the ranks were forked from."""
        started = self.pid
        (pid,) = (pid for pid, rank in self.pids().items() if rank is None and pid != started)
        return pid

    def rank(self, number: int) -> int:
        """Return the process of a rank."""
        (pid,) = (pid for pid, rank in self.pids().items() if rank == str(number))
        return pid


@contextmanager
def started(
    folder: Path,
    *overrides: str,
    command: list[str] | None = None,
    environ: Mapping[str, str] | None = None,
    terminal: int | None = None,
) -> Iterator[Run]:
    """Start ``train.py`` with these overrides from ``folder``; kill what is left of it at the end.

    Args:
        command: what runs ``train.py``; a Python that has loaded torch if left out, as for torchrun: see
            ``helpers.warm``. Others are started as they are, COLD among them, and all that have a terminal.
        environ: added to the environment, in which rank variables are not set and no GPU is visible.
        terminal: what the run is started on, in place of files that take its output.
    """

    def as_from_a_shell() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # tests may run in the background of a shell, which ignores it
        if terminal is not None:
            fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)  # what is typed there reaches the run as from a shell

    command = command or (COLD if terminal is not None else [])
    if not command or command[0] == TORCHRUN[0]:
        command = [warm(), *command]
    mark = uuid.uuid4().hex
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    with (folder / f"{mark}.out").open("wb") as out, (folder / f"{mark}.err").open("wb") as err:
        process = subprocess.Popen(
            [*command, TRAIN, *overrides],
            cwd=folder,
            stdin=subprocess.DEVNULL if terminal is None else terminal,
            stdout=out if terminal is None else terminal,
            stderr=err if terminal is None else terminal,
            env={**inherited, "CUDA_VISIBLE_DEVICES": "", **(environ or {}), _MARK: mark},
            start_new_session=True,
            preexec_fn=as_from_a_shell,
        )
    run = Run(process, folder, mark)
    try:
        yield run
    finally:
        for pid in run.pids():
            kill(pid, signal.SIGKILL)
        process.kill()
        process.wait()


def ran(
    folder: Path,
    *overrides: str,
    command: list[str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Ended:
    """Run ``train.py`` to its end, with the arguments of :func:`started`."""
    with started(folder, *overrides, command=command, environ=environ) as run:
        return run.end()


def free_port() -> int:
    """Return a port that is free on loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def kill(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that may be gone already."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def until(condition: Callable[[], object], seconds: float, what: str) -> None:
    """Wait until a condition holds; fail with ``what`` if it does not in time."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() < began + patience(seconds), f"not within {seconds:g} s: {what}"
        time.sleep(0.02)


def until_saved(run: Run, directory: Path) -> None:
    """Wait until a run is in the midst of training: its first checkpoint is there."""
    path = directory / "checkpoints"
    until(lambda: any(path.glob("last.*")) or run.process.poll() is not None, START_S, f"nothing is saved in {path}")
    assert run.process.poll() is None, (run.folder / f"{run.mark}.err").read_text()


def summary(directory: Path) -> dict[str, Any]:
    """Return what ``summary.json`` says."""
    values: dict[str, Any] = json.loads((directory / "summary.json").read_text())
    return values


def _processes() -> Iterator[tuple[int, str, dict[str, str]]]:
    """Yield id, name and environment of the processes that may be looked at, but for those that stand in for forks.

    One that has ended has no environment.
    """
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                text = (path / "environ").read_bytes().decode(errors="replace")
                arguments = (path / "cmdline").read_bytes().split(b"\0")
                name = (path / "comm").read_text().strip()
            except OSError:
                continue
            if CLIENT_FLAG.encode() in arguments[1:2]:
                continue
            yield int(path.name), name, dict(pair.split("=", 1) for pair in text.split("\0") if "=" in pair)
