"""What srun has started: a process as one of the tasks of a step. Loads no torch."""

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ddp_recipes.config.settings import LauncherSettings
from ddp_recipes.errors import RequestError
from ddp_recipes.launchers.environment import torchruns
from ddp_recipes.runtime.world import World


def translate(environ: Mapping[str, str]) -> dict[str, str] | None:
    """Return torchrun's variables for a task; ``None`` where srun has not started this process.

    Batch scripts and salloc's shells are in no step of tasks, and ``srun --pty bash`` is one of a shell.
    """
    if "SLURM_STEP_NUM_TASKS" not in environ:
        return None
    if "SLURM_PTY_PORT" in environ:  # jobs have it that are submitted from such a shell
        found = _is_task()
        if not (int(environ["SLURM_STEP_NUM_TASKS"]) > 1 if found is None else found):
            return None
    node = int(environ["SLURM_NODEID"])
    world = World(
        rank=int(environ["SLURM_PROCID"]),
        world_size=int(environ["SLURM_STEP_NUM_TASKS"]),
        local_rank=int(environ["SLURM_LOCALID"]),
        local_world_size=_tasks_per_node(environ["SLURM_STEP_TASKS_PER_NODE"])[node],
        node_rank=node,
    )
    # Steps of one job may run side by side, as may jobs on one node: each has its own port, the same on all its tasks.
    port = int(environ["SLURM_JOB_ID"]) * 16 + int(environ["SLURM_STEP_ID"])
    first = _first_host(environ["SLURM_STEP_NODELIST"])
    return torchruns(environ, world, first, port, environ.get("SLURM_CPUS_PER_TASK"))


def _is_task() -> bool | None:
    """Whether srun started this process or one of its ancestors, without a terminal, which a shell has between them.

    ``None`` if what started it is hidden: in a container, or where ``/proc`` shows users their own processes alone.
    """
    process = os.getppid()
    with suppress(OSError):
        while process:
            name, _, fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")
            _, parent, _, _, terminal, *_ = fields.split()
            if name.endswith("(slurmstepd"):
                return b".batch]" not in Path(f"/proc/{process}/cmdline").read_bytes()
            if terminal != "0":
                return False
            process = int(parent)
    return None


def refuse_other_tasks(world: World, launcher: LauncherSettings, environ: Mapping[str, str]) -> None:
    """Refuse a Slurm step that has another layout than the config requests; ranks of a torchrun in it are its own."""
    if "TORCHELASTIC_RUN_ID" in environ:
        return
    for name, option, requested, default, available in (
        ("nproc_per_node", "--ntasks-per-node", launcher.nproc_per_node, "auto", world.local_world_size),
        ("nnodes", "--nodes", launcher.nnodes, 1, world.nnodes),
    ):
        if requested not in (default, available):
            raise RequestError(
                f"launcher.{name}={requested}, but Slurm started this step with {option}={available} "
                f"({world.world_size} tasks in all). Start it with srun {option}={requested}, or leave "
                f"launcher.{name} out: the step's layout is taken as it is."
            )


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
