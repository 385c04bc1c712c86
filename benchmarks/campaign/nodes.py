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
    """

    def __init__(
        self,
        cluster: Cluster,
        overrides: Sequence[str],
        ranks: int,
        folder: Path,
        output: Path,
        environ: Mapping[str, str],
    ) -> None:
        self.cluster = cluster
        self.tasks = folder / "tasks"
        self.tasks.mkdir()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        nodes = ["launcher=nodes", f"launcher.rdzv_endpoint=127.0.0.1:{port}", f"launcher.nproc_per_node={ranks}"]
        run = shlex.join([sys.executable, TRAIN, *overrides, *nodes])
        # Both nodes are this machine, so whoever came first would hold the store: the first one is to.
        waits = f"until [ $NAME = 0 ] || (echo > /dev/tcp/127.0.0.1/{port}) 2>/dev/null; do sleep 0.05; done"
        task = f"NAME=${{CAME:-$SLURM_NODEID}}; {waits}; echo $$ > {self.tasks}/$NAME; {run}; "
        # A node that comes when the run has ended finds nothing to do, and says so in another summary.
        keeps = f"[ $NAME != 0 ] || cp disk/run/summary.json {self.tasks}"
        self._task = ["bash", "-c", f"{task} STATUS=$?; {keeps}; echo $STATUS > {self.tasks}/$NAME.status"]
        self._came = 1  # the last one's name
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
        return super().running if "0" not in names else not all(map(self._ended, names))

    @property
    def status(self) -> int:
        """The exit status of the first task that failed, or zero."""
        found = [int((self.tasks / f"{name}.status").read_text()) for name in self._names() if self._ended(name)]
        return next(filter(None, found), 0) if found else self.process.returncode or 1

    def second(self) -> int | None:
        """Return the task of the second node, if it has begun and its node was not lost."""
        name = str(self._came)
        found = name in self._names() and not self._ended(name)
        return int((self.tasks / name).read_text() or 0) or None if found else None

    def lose_node(self, task: int) -> bool:
        """Kill all that runs on the second node; return whether no rank was among it."""
        self._lost.add(str(self._came))
        found = self.processes()
        self.cluster.lose_node(NODES[1], task)

        def below(pid: int) -> bool:
            return pid == task or (pid in found and below(found[pid][0]))

        return not any(below(pid) for pid, (_, name) in found.items() if name.startswith("rank "))

    def return_node(self) -> None:
        """Start the second node again, and the same command on it."""
        self._came += 1
        self.cluster.start_node(NODES[1])
        command = ["srun", "--nodes=1", f"--nodelist={NODES[1]}", *self._task]
        self._others.append(self.popen(command, {**self._environ, "CAME": str(self._came)}))

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
