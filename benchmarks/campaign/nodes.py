"""A start on two nodes of a real Slurm, each with a supervisor of its own; a node can be lost, and come back."""

import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from benchmarks.campaign.processes import TRAIN, Start
from benchmarks.cluster import NODES, Cluster

SRUN_S = 5.0  # for srun to end after the last task
KEY = "a secret that these nodes have"


class NodesStart(Start):
    """One ``srun`` of a task on each node, and one more for each node that comes back.

    A task notes its process, and in the end its exit status, in the folder ``tasks``.

    Args:
        in_file: whether nodes meet in a file, and not at the first one; then either may be lost.

    Attributes:
        may_lose: the nodes that may be lost.
    """

    def __init__(
        self,
        cluster: Cluster,
        overrides: Sequence[str],
        ranks: int,
        folder: Path,
        output: Path,
        environ: Mapping[str, str],
        in_file: bool,
    ) -> None:
        self.cluster, self.may_lose = cluster, (0, 1) if in_file else (1,)
        self.tasks = folder / "tasks"
        self.tasks.mkdir()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        meet = [f"rdzv_endpoint=file://{folder}/meet", "local_addr=127.0.0.1"]
        nodes = [f"launcher.{each}" for each in (meet if in_file else [f"rdzv_endpoint=127.0.0.1:{port}"])]
        run = shlex.join(
            [sys.executable, TRAIN, *overrides, "launcher=nodes", *nodes, f"launcher.nproc_per_node={ranks}"]
        )
        # Both nodes are this machine, so whoever came first would hold the store: the first one is to.
        waits = f"until [ $NAME = 0 ] || (echo > /dev/tcp/127.0.0.1/{port}) 2>/dev/null; do sleep 0.05; done; "
        task = f"NAME=${{CAME:-$SLURM_NODEID}}; {'' if in_file else waits}echo $$ > {self.tasks}/$NAME; {run}; "
        # A node that comes when the run has ended finds nothing to do, and says so in another summary.
        keeps = f"[ -e {self.tasks}/summary.json ] || cp disk/run/summary.json {self.tasks}"
        self._task = ["bash", "-c", f"{task} STATUS=$?; {keeps}; echo $STATUS > {self.tasks}/$NAME.status"]
        self._on = ["0", "1"]  # names of the tasks that were the last on each node
        self._lost: set[str] = set()  # names of tasks
        self._others: list[subprocess.Popen[bytes]] = []
        self._environ = {**environ, **cluster.environ, "DDP_RECIPES_KEY": KEY}
        command = ["srun", "--no-kill", "--nodes=2", "--ntasks-per-node=1", *self._task]
        super().__init__(command, folder, output, self._environ)

    def _names(self) -> list[str]:
        """Return the tasks that have begun, and were not lost."""
        return [path.name for path in self.tasks.glob("[0-9]") if path.name not in self._lost]

    def _ended(self, name: str) -> bool:
        return (self.tasks / f"{name}.status").exists()

    @property
    def running(self) -> bool:
        """Whether a task still runs: srun itself may wait for a node that is lost."""
        names = self._names()
        return not all(map(self._ended, names)) if names else super().running

    @property
    def status(self) -> int:
        """The exit status of the first task that failed, or zero."""
        found = [int((self.tasks / f"{name}.status").read_text()) for name in self._names() if self._ended(name)]
        return next(filter(None, found), 0) if found else self.process.returncode or 1

    @property
    def lost(self) -> int | None:
        """The node that is lost, if one is."""
        return next((node for node, name in enumerate(self._on) if name in self._lost), None)

    def task(self, node: int) -> int | None:
        """Return the task of a node, if it has begun and its node was not lost."""
        name = self._on[node]
        found = name in self._names() and not self._ended(name)
        return int((self.tasks / name).read_text() or 0) or None if found else None

    def lose_node(self, node: int, task: int) -> bool:
        """Kill all that runs on a node, its task among it; return whether no rank was."""
        self._lost.add(self._on[node])
        found = self.processes()
        self.cluster.lose_node(NODES[node], task)

        def below(pid: int) -> bool:
            return pid == task or (pid in found and below(found[pid][0]))

        return not any(below(pid) for pid, (_, name) in found.items() if name.startswith("rank "))

    def return_node(self) -> None:
        """Start the lost node again, and the same command on it."""
        node = self.lost
        assert node is not None
        self._on[node] = name = str(2 + len(self._others))
        self.cluster.start_node(NODES[node])
        command = ["srun", "--nodes=1", f"--nodelist={NODES[node]}", *self._task]
        self._others.append(self.popen(command, {**self._environ, "CAME": name}))

    def gone(self, seconds: float) -> bool:
        """Wait until no process is left, and srun has ended, or is ended where it would wait for a lost node."""
        for srun in (self.process, *self._others):
            with suppress(subprocess.TimeoutExpired):
                srun.wait(SRUN_S if self._lost else seconds)
        if self._lost:
            self.cluster.command("scancel", "--user=root")
            for srun in (self.process, *self._others):
                srun.kill()
                srun.wait()
        return super().gone(seconds)

    def kill_all(self) -> None:
        """Kill every process of it, and have the nodes free."""
        super().kill_all()
        for srun in self._others:
            srun.wait()
        self.cluster.command("scancel", "--user=root")
        self.cluster.await_empty()
        if (kept := self.tasks / "summary.json").exists():
            shutil.copy(kept, self.folder / "disk" / "run")
