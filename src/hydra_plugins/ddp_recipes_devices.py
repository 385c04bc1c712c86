"""``hydra/launcher=devices``: jobs of a sweep side by side on this machine's devices, each seeing only its own.

Hydra imports every plugin in every application, so nothing heavy is imported here.
"""

import os
import pickle
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.config_store import ConfigStore
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

if TYPE_CHECKING:
    from ddp_recipes.devices import Found

AFTER_STOP_S = 10.0


# ``slots``: how many processes run at once on a machine without GPUs; null: its cores.
ConfigStore.instance().store(
    group="hydra/launcher",
    name="devices",
    node={"_target_": "hydra_plugins.ddp_recipes_devices.DevicesLauncher", "slots": None},
    provider="ddp_recipes_devices",
)


@dataclass
class _Job:
    """A running job, the pipe that brings its result, and the devices it holds."""

    number: int
    process: BaseProcess
    result: Connection
    devices: list[str]


class DevicesLauncher(Launcher):
    """Gives each job as many devices as its replicas need; a job waits until so many are free.

    A device is a visible GPU, or on a machine without any a slot. What a job needs is its number of processes times
    ``model.num_devices`` on GPUs, and its number of processes on a CPU.
    """

    def __init__(self, slots: int | None = None) -> None:
        self.slots = slots

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Take what Hydra gives every launcher."""
        self.hydra_context, self.task_function, self.config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the jobs; return their results, in order.

        Raises:
            RequestError: a job needs more devices than are available.
            BaseException: what a job raised to end the sweep.
        """
        from ddp_recipes.devices import visible
        from ddp_recipes.errors import RequestError

        setup_globals()
        Path(str(self.config.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
        found = visible("auto")
        cores = len(os.sched_getaffinity(0))
        free = _visible_names(found.count) or [""] * (self.slots or cores)
        available = len(free)
        self._threads = max(1, cores // available)
        waiting = [(number, list(overrides)) for number, overrides in enumerate(job_overrides, initial_job_idx)]
        needs = {number: self._needed(overrides, found) for number, overrides in waiting}
        for number, overrides in waiting:
            if needs[number] > available:
                raise RequestError(
                    f"Job {number} ({' '.join(overrides)}) needs {needs[number]} devices, and {available} are "
                    f"available. Use a smaller launcher.nproc_per_node or model.num_devices, or more "
                    f"hydra.launcher.slots."
                )
        running: list[_Job] = []
        done: dict[int, JobReturn] = {}
        try:
            while waiting or running:
                while waiting and needs[waiting[0][0]] <= len(free):
                    number, overrides = waiting.pop(0)
                    devices = [free.pop(0) for _ in range(needs[number])]
                    running.append(self._start(number, overrides, devices))
                ended = connection.wait([job.result for job in running])
                for job in [job for job in running if job.result in ended]:
                    running.remove(job)
                    free += job.devices
                    done[job.number] = _result(job)
        finally:
            _stop(running)
        return [done[number] for number in sorted(done)]

    def _needed(self, overrides: Sequence[str], found: "Found") -> int:
        from ddp_recipes.config.request import Request, resolve
        from ddp_recipes.devices import HOST
        from ddp_recipes.errors import RequestError

        config = self.hydra_context.config_loader.load_sweep_config(self.config, list(overrides))
        task = OmegaConf.masked_copy(config, [str(name) for name in config if name != "hydra"])
        try:
            request = Request.of(resolve(task))
            return request.processes(found) * (request.num_devices if request.device_type(found) != HOST else 1)
        except RequestError:
            return 1  # the job raises it, too

    def _start(self, number: int, overrides: Sequence[str], devices: list[str]) -> _Job:
        import cloudpickle  # Hydra's state holds functions and twice imported classes, which plain pickle refuses

        spawn = get_context("spawn")  # a fresh process: one that has not yet looked for GPUs
        receiver, sender = spawn.Pipe(duplex=False)
        work = cloudpickle.dumps((self.hydra_context, self.config, self.task_function, Singleton.get_state()))
        arguments = sender, ",".join(devices), self._threads, number, overrides, work
        process = spawn.Process(target=_execute, args=arguments)
        process.start()
        sender.close()
        return _Job(number, process, receiver, devices)


def _execute(
    sender: Connection, devices: str, threads: int, number: int, overrides: Sequence[str], work: bytes
) -> None:
    """Run one job in this fresh process and send its result, or what it raised to end the sweep."""
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # of each of its processes: the cores are for all jobs
    import cloudpickle

    from ddp_recipes.runtime.process import die_with_parent

    if devices.strip(","):
        os.environ["CUDA_VISIBLE_DEVICES"] = devices
    die_with_parent()
    hydra_context, config, task_function, singletons = pickle.loads(work)
    setup_globals()
    Singleton.set_state(singletons)
    job_config = hydra_context.config_loader.load_sweep_config(config, list(overrides))
    with open_dict(job_config):
        job_config.hydra.job.id = f"{job_config.hydra.job.name}_{number}"
        job_config.hydra.job.num = number
    try:
        outcome: Any = run_job(
            hydra_context=hydra_context,
            config=job_config,
            task_function=task_function,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
        )
    except BaseException as error:  # noqa: BLE001 - it is raised again in the process that asked
        outcome = error
    sender.send_bytes(cloudpickle.dumps(outcome))


def _result(job: _Job) -> JobReturn:
    try:
        outcome = pickle.loads(job.result.recv_bytes())
    except EOFError:
        job.process.join()
        status = job.process.exitcode
        raise RuntimeError(f"Job {job.number} exited with exit code {status} and without a report.") from None
    job.process.join()
    if isinstance(outcome, BaseException):
        raise outcome
    assert isinstance(outcome, JobReturn)
    return outcome


def _stop(jobs: Sequence[_Job]) -> None:
    """Have what still runs stop, as a scheduler would: each job saves a checkpoint if it can."""
    for job in jobs:
        if job.process.pid is not None and job.process.is_alive():
            os.kill(job.process.pid, signal.SIGTERM)
    for job in jobs:
        job.process.join(AFTER_STOP_S)
        if job.process.is_alive():
            job.process.kill()
            job.process.join()


def _visible_names(gpus: int) -> list[str]:
    """Return the names of the visible GPUs, as ``CUDA_VISIBLE_DEVICES`` has them: numbers or UUIDs.

    Of parts of GPUs (MIG) CUDA shows a process the first one alone; other processes can have the others.
    """
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    if gpus and named and all(name.startswith("MIG-") for name in named):
        return named
    return named[:gpus] if named else [str(number) for number in range(gpus)]
