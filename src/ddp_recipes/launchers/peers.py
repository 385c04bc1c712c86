"""The other ranks' processes on this node, as far as torchrun's agent started them: which have ended, which hang."""

import json
import os
import signal
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from torch.distributed import Store

from ddp_recipes.control import Patience
from ddp_recipes.job import Job
from ddp_recipes.launchers import stacks
from ddp_recipes.run_directory import write_trace
from ddp_recipes.world import World


def agent_holds_store() -> bool:
    """Whether the store is torchrun's, and so outlives every rank."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


class Peers:
    """Knows them by what each says of itself. Without an agent there is nothing to know: others see to their ranks."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._store: Store | None = None
        self._stacks = tempfile.TemporaryFile()  # noqa: SIM115
        if agent_holds_store():  # anything else that starts ranks may want SIGUSR2 for itself
            stacks.write_when_asked(self._stacks.fileno())

    def introduce(self, store: Store) -> None:
        """Say which process this rank is."""
        self._store = store
        process = {"pid": os.getpid(), "parent": os.getppid(), "stacks": self._stacks.fileno()}
        store.set(f"process/{self.world.rank}", json.dumps({"node": self.world.node_rank, **process}))

    def gone(self) -> list[int]:
        """Return the ranks here whose process has ended."""
        others = (rank for rank in range(self.world.world_size) if rank != self.world.rank)
        return [rank for rank in others if (found := self._find(rank)) is not None and not _runs(found[0])]

    def end(self, ranks: Sequence[int], job: Job) -> None:
        """Write where these ranks stand, and end them, those that are here and still run.

        The agent would first send SIGTERM, which a stopped process does not take, and then wait half a minute.
        """
        for rank in ranks:
            found = self._find(rank)
            if found is None or not _runs(found[0]):
                continue
            pid, file = found
            with suppress(OSError), open(f"/proc/{pid}/fd/{file}", "rb") as written:
                if text := stacks.ask({pid: written})[pid]:
                    write_trace(job.directory, rank, text)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _find(self, rank: int) -> tuple[int, int] | None:
        """Return a rank's process and its file for stacks, if it is a child of the agent that started this rank."""
        if self._store is None or not agent_holds_store():
            return None
        said = Patience().ask(partial(self._store.get, f"process/{rank}"), None)
        process = {} if said is None else json.loads(said)
        here = (process.get("node"), process.get("parent")) == (self.world.node_rank, os.getppid())
        return (process["pid"], process["stacks"]) if here else None


def _runs(pid: int) -> bool:
    """Whether a child of this process's parent runs: it does not if it is gone, or was not waited for yet."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return False
    return state not in "ZX" and int(parent) == os.getppid()
