"""Start ``train.py`` as a user does, and find every process of it by a mark that all of them inherit, orphans too."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

TRAIN = str(Path(__file__).parents[2] / "train.py")
_MARK = "CAMPAIGN_START"
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Start:
    """One start of the command, in a process group of its own, as at a terminal.

    Args:
        alone: whether the process that is started is the only rank itself.
    """

    def __init__(
        self, command: Sequence[str], folder: Path, output: Path, environ: Mapping[str, str], alone: bool = False
    ) -> None:
        self.mark = uuid.uuid4().hex
        self.folder = folder
        self.output = output
        self.alone = alone
        self.process = self.popen(command, environ)

    def popen(self, command: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start a process of it."""
        inherited = {name: value for name, value in os.environ.items() if name not in _RANK_VARIABLES}
        with self.output.open("ab") as file:
            return subprocess.Popen(
                command,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**inherited, "CUDA_VISIBLE_DEVICES": "", **environ, _MARK: self.mark},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The process that was started."""
        return self.process.pid

    @property
    def running(self) -> bool:
        """Whether it still runs."""
        return self.process.poll() is None

    @property
    def status(self) -> int:
        """The exit status of one that has ended."""
        return self.process.wait()

    def text(self) -> str:
        """Return what it printed so far."""
        return self.output.read_text(errors="replace")

    def processes(self) -> dict[int, tuple[int, str]]:
        """Return the living processes of this start: id to parent and name; a rank is named ``rank 0``."""
        found = {}
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit():
                continue
            try:
                environ = (folder / "environ").read_bytes().split(b"\0")
                if f"{_MARK}={self.mark}".encode() not in environ:
                    continue
                before, _, after = (folder / "stat").read_text().rpartition(")")
            except OSError:
                continue  # it has ended meanwhile, or is somebody else's
            state, parent = after.split()[:2]
            name = before.partition("(")[2]
            # The local launcher names its ranks; torchrun gives its children a variable.
            rank = next((pair[5:].decode() for pair in environ if pair.startswith(b"RANK=")), None)
            if rank is not None and int(parent) == self.pid:
                name = f"rank {rank}"
            if state not in "ZX":
                found[int(folder.name)] = (int(parent), name)
        return found

    def rank(self, number: int) -> int | None:
        """Return the process of a rank, or ``None`` where it is not there yet, or not any more."""
        if self.alone:
            return self.pid if self.running else None
        return next((pid for pid, (_, name) in self.processes().items() if name == f"rank {number}"), None)

    def worker(self, number: int) -> int | None:
        """Return a data worker of a rank, or ``None``."""
        rank = self.rank(number)
        return next((pid for pid, (parent, _) in self.processes().items() if parent == rank), None)

    def server(self) -> int | None:
        """Return the process that local ranks were forked from, or ``None``."""
        found = self.processes()
        return next((parent for parent, name in found.values() if name.startswith("rank ")), None)

    def gone(self, seconds: float) -> bool:
        """Wait until no process is left; return whether that came true in time."""
        deadline = time.monotonic() + seconds
        while self.processes() or self.running:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def kill_all(self) -> None:
        """Kill every process of it."""
        while found := self.processes():
            for pid in found:
                kill(pid, signal.SIGKILL)
            self.process.poll()
            time.sleep(0.01)
        self.process.wait()


def command(mode: str, world_size: int, max_restarts: int, overrides: Sequence[str]) -> list[str]:
    """Return the command line that a user would type."""
    python = [sys.executable]
    if mode == "torchrun":
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
        return [*python, *torchrun, f"--max-restarts={max_restarts}", TRAIN, *overrides]
    again = "launcher.replace_ranks=20" if mode == "replace" else f"launcher.max_restarts={max_restarts}"
    ranks = [f"launcher.nproc_per_node={world_size}", again]
    return [*python, TRAIN, *overrides, *ranks]


def kill(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that may be gone already."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)
