"""The other ranks' processes on this node, as far as torchrun's agent started them: which have exited, which hang."""

import os
import signal
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ddp_recipes.errors import RunFailed
from ddp_recipes.launchers import reports
from ddp_recipes.launchers.store import agent_holds_store
from ddp_recipes.reporting.run_directory import leave_trace
from ddp_recipes.runtime.job import ASKS_TO_STOP
from ddp_recipes.runtime.messages import Messages
from ddp_recipes.runtime.process import ignore, state
from ddp_recipes.runtime.world import World

DEAD_S = 5.0  # for a killed rank to be dead, and to hold no lock any more


class Peers:
    """Finds them among the children of the agent. Without one it finds none: what started the ranks watches them."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._messages: Messages | None = None
        self._seen: set[int] = set()
        self._stacks = tempfile.TemporaryFile()  # noqa: SIM115
        if agent_holds_store():  # anything else that starts ranks may want SIGUSR2 for itself
            reports.write_at_death(self._stacks.fileno())

    def introduce(self, messages: Messages) -> None:
        """Publish where this rank writes its stacks."""
        self._messages = messages
        self.exited()
        messages.set(f"stacks/{self.world.rank}", str(self._stacks.fileno()))

    def exited(self) -> list[int]:
        """Return the ranks of this node whose process was seen to run, and has exited.

        Where the agent starts something else that starts the rank, a script say, no other rank's is ever seen.
        """
        if not agent_holds_store():
            return []
        running = self._running().keys()
        self._seen |= running
        return sorted(self._seen - running)

    def absent(self) -> set[int]:
        """Return the ranks of this node that do not run: they have exited, or, in its first instants, not begun."""
        running = self._running().keys() if agent_holds_store() else set()
        if self.world.rank not in running:  # the agent starts something else that starts ranks
            return set()
        first = self.world.rank - self.world.local_rank
        return {*range(first, first + self.world.local_world_size)} - running

    def end(self, ranks: Sequence[int], directory: Path | None) -> None:
        """Write the stacks of these ranks, and kill them, those of this node that still run.

        The agent would first send SIGTERM, which a stopped process does not take, and then wait half a minute. This
        rank gets one once another is dead, before it has said why: from now on it is ignored.
        """
        running = self._running() if agent_holds_store() else {}
        ends = running.keys() & {*ranks} - {self.world.rank}
        if ends:
            ignore(ASKS_TO_STOP)
        for rank in ends:
            pid = running[rank]
            with suppress(OSError), open(f"/proc/{pid}/fd/{self._file_of(rank)}", "rb") as file:
                text = reports.request({pid: file})[pid]
                if directory is not None:
                    leave_trace(directory, rank, text)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + DEAD_S
        while any(_has_threads(running[rank]) for rank in ends) and time.monotonic() < deadline:
            time.sleep(0.02)

    def _file_of(self, rank: int) -> str:
        """Return the file descriptor of a rank's stacks; empty if it never came so far."""
        with suppress(RunFailed):
            return (self._messages.get(f"stacks/{rank}") or "") if self._messages is not None else ""
        return ""

    def _running(self) -> dict[int, int]:
        """Return the processes of ranks that this rank's parent started and that have not exited, by rank."""
        found: dict[int, int] = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has exited meanwhile, or belongs to somebody else
                letter, parent = state(int(folder.name))
                if parent == os.getppid() and letter not in "ZX":
                    pairs = (folder / "environ").read_bytes().split(b"\0")
                    found |= {int(pair[5:]): int(folder.name) for pair in pairs if pair.startswith(b"RANK=")}
        return found


def _has_threads(process: int) -> bool:
    """Whether a process still runs, or one of its threads does: until the last one has ended its files are open."""
    try:
        return state(process)[0] not in "ZX" or len(os.listdir(f"/proc/{process}/task")) > 1
    except OSError:
        return False
