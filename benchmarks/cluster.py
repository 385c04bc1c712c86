"""A real Slurm on this machine: two nodes, started without systemd and apart from the system's."""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

START_S = 30.0
STOP_S = 20.0
NODES = ("127.0.0.1", "127.0.0.2")
DAEMONS = ("munged", "slurmctld", "slurmd")

# The nodes are called by addresses, so that they resolve.
CONFIG = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0,sched_min_interval=0
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SlurmdTimeout=10
KillWait=3
JobRequeue=1
FirstJobId={first_job}
SlurmdParameters=config_overrides
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
NodeName=127.0.0.[1-2] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[{ports[1]},{ports[2]}] \\
  CPUs={cpus} RealMemory=1000 State=UNKNOWN
PartitionName=debug Nodes=127.0.0.[1-2] Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True)
class Cluster:
    """A running Slurm."""

    folder: Path

    @property
    def environ(self) -> dict[str, str]:
        """What a command needs to find it."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def command(self, *words: str) -> str:
        """Run one of Slurm's commands and return what it prints, or nothing where it fails."""
        done = subprocess.run(words, env={**os.environ, **self.environ}, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    def state(self, job: str) -> dict[str, str]:
        """Return what the controller says of a job."""
        words = self.command("scontrol", "show", "job", "--oneliner", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def lose_node(self, address: str, task: int) -> None:
        """Kill all that runs on a node, as the loss of its power would: the daemon, and a task with what started it."""
        children: dict[int, list[int]] = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                children.setdefault(int(path.read_text().rpartition(")")[2].split()[1]), []).append(int(path.parts[2]))
        step = int(Path(f"/proc/{task}/stat").read_text().rpartition(")")[2].split()[1])
        found = [int((self.folder / f"slurmd.{address}.pid").read_text()), step]
        for pid in found:  # grows
            found += [child for child in children.get(pid, []) if child not in found]
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def start_node(self, address: str) -> None:
        """Start a node's daemon, which the cluster ends: it is no process that a test leaves."""
        program = _which("slurmd")
        assert program is not None
        words = [program, "-N", address, "-f", self.environ["SLURM_CONF"]]
        environ = {name: value for name, value in os.environ.items() if name != "DDP_RECIPES_TEST_PROCESS"}
        with (self.folder / "slurmd.out").open("ab") as out:
            subprocess.run(words, stdout=out, stderr=out, check=True, env={**environ, **self.environ})

    def await_idle(self) -> bool:
        """Wait until both nodes are free; return whether that came true."""
        return _await(lambda: self.command("sinfo", "-h", "-t", "idle", "-o", "%D") == "2", START_S)

    def await_empty(self) -> bool:
        """Wait until nothing is left in the queue; return whether that came true."""
        return _await(lambda: not self.command("squeue", "--noheader"), STOP_S)


def lacking() -> str | None:
    """Return why no Slurm can be started here, or ``None``."""
    if missing := [name for name in (*DAEMONS, "srun", "sbatch", "scontrol") if _which(name) is None]:
        return f"no Slurm here ({', '.join(missing)}): apt-get install slurm-wlm munge slurm-wlm-basic-plugins"
    return "Slurm's daemons are started as root" if os.geteuid() != 0 else None


@contextmanager
def running(cpus: int = 1) -> Iterator[Cluster]:
    """Start a Slurm, and stop it in the end with all that is left in its queue.

    Args:
        cpus: of each node: with one, a job of two nodes fills the cluster.
    """
    folder = Path(tempfile.mkdtemp(prefix="slurm_", dir="/tmp"))  # a short path: munge's socket has a limit
    cluster = Cluster(folder)
    try:
        _start(cluster, cpus)
        yield cluster
    finally:
        cluster.command("scancel", "--user=root")
        cluster.await_empty()
        _stop(folder)
        shutil.rmtree(folder, ignore_errors=True)


def _start(cluster: Cluster, cpus: int) -> None:
    folder = cluster.folder
    with socket.socket() as one, socket.socket() as two, socket.socket() as three:
        for listener in (one, two, three):
            listener.bind(("127.0.0.1", 0))
        ports = [listener.getsockname()[1] for listener in (one, two, three)]
    # Ranks meet at a port made of the job's number: clusters that run side by side here must not share numbers.
    first_job = 1 + 40 * (os.getpid() % 31)
    (folder / "slurm.conf").write_text(CONFIG.format(folder=folder, ports=ports, first_job=first_job, cpus=cpus))
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    conf = cluster.environ["SLURM_CONF"]
    files = {"socket": "munge.socket", "pid-file": "munged.pid", "log-file": "munged.log", "seed-file": "munge.seed"}
    munge = [f"--{option}={folder / name}" for option, name in files.items()]
    for words in (
        ["munged", "--force", f"--key-file={key}", *munge],
        ["slurmctld", "-i", "-f", conf],
    ):
        program = _which(words[0])
        assert program is not None
        with (folder / f"{words[0]}.out").open("ab") as out:
            subprocess.run(
                [program, *words[1:]], stdout=out, stderr=out, check=True, env={**os.environ, **cluster.environ}
            )
    for address in NODES:
        cluster.start_node(address)
    assert cluster.await_idle(), "\n".join(path.read_text(errors="replace") for path in folder.glob("*.log"))


def _stop(folder: Path) -> None:
    pids = [int(path.read_text()) for path in folder.glob("*.pid")]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in filter(_runs, pids):
            os.kill(pid, number)
        if _await(lambda: not any(map(_runs, pids)), STOP_S):
            return


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _await(condition: Callable[[], object], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _which(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
