"""Who started this process: torchrun, Slurm's srun or mpirun. Each has its own names; here they become torchrun's."""

import os
import re
import socket
from collections.abc import Mapping, MutableMapping

from ddp_recipes.config.settings import LauncherSettings
from ddp_recipes.errors import RequestError
from ddp_recipes.runtime.world import World

# What a rank is called by: Open MPI's mpirun; the mpirun of MPICH and Intel MPI.
_MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
_FIRST_PORT, _PORTS = 10_000, 20_000  # below the ports that systems hand out by themselves


def join(environ: MutableMapping[str, str]) -> World | None:
    """Return this process's place among those that something started together, or ``None`` if it was started alone.

    Torchrun's variables are set in ``environ`` where they were not.

    Raises:
        RequestError: the variables are incomplete or contradict each other, or the first host has no address.
    """
    variables = translate(environ)
    if variables is None:
        return None
    environ.update(variables)
    world = World.from_env(environ)
    if world.world_size > 1:
        _refuse_unknown_host(environ["MASTER_ADDR"])
    return world


def translate(environ: Mapping[str, str]) -> dict[str, str] | None:
    """Return torchrun's variables for this process, or ``None`` if it was started alone.

    Raises:
        RequestError: mpirun started it on several hosts, and nothing says which one is the first.
    """
    if World.is_set_in(environ):
        return {}  # torchrun, or somebody who knows its names
    for names in _MPI:
        if all(name in environ for name in names):
            return _of_mpirun(names, environ)
    if _in_slurm_step(environ):
        return _of_srun(environ)
    return None


def tasks(environ: Mapping[str, str]) -> int:
    """Return how many processes something other than torchrun started together with this one, itself included."""
    return int((translate(environ) or {}).get("WORLD_SIZE", 1))


def refuse_other_tasks(world: World, launcher: LauncherSettings, environ: Mapping[str, str]) -> None:
    """Refuse a Slurm step that has another layout than the config asks for.

    Raises:
        RequestError: says what there is and what was asked.
    """
    if "SLURM_STEP_ID" not in environ:
        return
    asked = {"nproc_per_node": launcher.nproc_per_node, "nnodes": launcher.nnodes}
    there = {"nproc_per_node": world.local_world_size, "nnodes": world.nnodes}
    options = {"nproc_per_node": "--ntasks-per-node", "nnodes": "--nodes"}
    for name, default in (("nproc_per_node", "auto"), ("nnodes", 1)):
        if asked[name] not in (default, there[name]):
            raise RequestError(
                f"launcher.{name}={asked[name]}, but Slurm started this step with {options[name]}={there[name]} "
                f"({world.world_size} tasks in all). Start it with srun {options[name]}={asked[name]}, or leave "
                f"launcher.{name} out: the step's layout is taken as it is."
            )


def _in_slurm_step(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process; batch scripts and salloc's shells have no step, ``srun --pty bash`` is one."""
    return "SLURM_STEP_ID" in environ and "SLURM_STEP_NUM_TASKS" in environ and "SLURM_PTY_PORT" not in environ


def _of_srun(environ: Mapping[str, str]) -> dict[str, str]:
    node = int(environ["SLURM_NODEID"])
    tasks = _tasks_per_node(environ["SLURM_STEP_TASKS_PER_NODE"])[node]
    # Steps of one job may run side by side, as may jobs on one node: each has its own port, the same on all its tasks.
    number = int(environ["SLURM_JOB_ID"]) * 16 + int(environ["SLURM_STEP_ID"])
    return {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": environ["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environ["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(tasks),
        "GROUP_RANK": str(node),
        "MASTER_ADDR": environ.get("MASTER_ADDR") or _first_host(environ["SLURM_STEP_NODELIST"]),
        "MASTER_PORT": environ.get("MASTER_PORT") or str(_FIRST_PORT + number % _PORTS),
        "OMP_NUM_THREADS": environ.get("OMP_NUM_THREADS") or environ.get("SLURM_CPUS_PER_TASK") or _threads(tasks),
    }


def _of_mpirun(names: tuple[str, str, str, str], environ: Mapping[str, str]) -> dict[str, str]:
    rank, size, local_rank, local_size = (environ[name] for name in names)
    one_host = size == local_size
    if not one_host and not ("MASTER_ADDR" in environ and "MASTER_PORT" in environ):
        raise RequestError(
            f"mpirun started {size} ranks on several hosts, and MPI does not say where rank 0 is. Give every rank the "
            f"same address and a free port there: mpirun -x MASTER_ADDR=<first host> -x MASTER_PORT=29500 … "
            f"(MPICH, Intel MPI: -genv MASTER_ADDR <first host> …)."
        )
    return {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": local_size,
        "GROUP_RANK": str(int(rank) // int(local_size)),
        "MASTER_ADDR": environ.get("MASTER_ADDR") or "127.0.0.1",
        # On one host mpirun, or its one helper there, is the parent of all ranks, and of no others.
        "MASTER_PORT": environ.get("MASTER_PORT") or str(_FIRST_PORT + os.getppid() % _PORTS),
        "OMP_NUM_THREADS": environ.get("OMP_NUM_THREADS") or _threads(int(local_size)),
    }


def _threads(processes: int) -> str:
    return str(max(1, len(os.sched_getaffinity(0)) // processes))


def _first_host(nodes: str) -> str:
    """Return the first name of a Slurm host list: ``gpu[07-09,12],login1`` begins with ``gpu07``."""
    match = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", match[0]) if match else nodes


def _tasks_per_node(text: str) -> list[int]:
    """Return the numbers that Slurm writes as ``2(x3),1``."""
    numbers = []
    for part in text.split(","):
        count, _, times = part.rstrip(")").partition("(x")
        numbers += [int(count)] * int(times or 1)
    return numbers


def _refuse_unknown_host(host: str) -> None:
    """Refuse a first host without an address: torch would wait for it in silence."""
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        raise RequestError(
            f"The host of rank 0, MASTER_ADDR={host}, has no address here: {error.strerror}. Set MASTER_ADDR to a name "
            f"or an IP address under which every node reaches it."
        ) from None
