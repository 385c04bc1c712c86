"""``hydra/launcher=devices``: jobs of a sweep side by side on this machine's devices, each seeing only its own.

Hydra imports every plugin in every application, so nothing heavy is imported here.
"""

import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe, connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from hydra.core.config_store import ConfigStore
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, run_job, setup_globals
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

    config: DictConfig
    process: subprocess.Popen[bytes]
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
        waiting = [self._composed(number, list(each)) for number, each in enumerate(job_overrides, initial_job_idx)]
        needs = [_needed(config, found) for config in waiting]
        for config, needed in zip(waiting, needs, strict=True):
            if needed > available:
                hydra = config.hydra
                raise RequestError(
                    f"Job {hydra.job.num} ({' '.join(hydra.overrides.task)}) needs {needed} devices, and "
                    f"{available} are available. Use a smaller launcher.nproc_per_node or model.num_devices, or more "
                    f"hydra.launcher.slots."
                )
        running: list[_Job] = []
        done: dict[int, JobReturn] = {}
        try:
            while waiting or running:
                while waiting and needs[0] <= len(free):
                    devices = [free.pop(0) for _ in range(needs.pop(0))]
                    running.append(self._start(waiting.pop(0), devices))
                ended = connection.wait([job.result for job in running])
                for job in [job for job in running if job.result in ended]:
                    running.remove(job)
                    free += job.devices
                    done[job.config.hydra.job.num] = _result(job)
        finally:
            _stop(running)
        return [done[number] for number in sorted(done)]

    def _composed(self, number: int, overrides: list[str]) -> DictConfig:
        config: DictConfig = self.hydra_context.config_loader.load_sweep_config(self.config, overrides)
        with open_dict(config):
            config.hydra.job.id = f"{config.hydra.job.name}_{number}"
            config.hydra.job.num = number
        return config

    def _start(self, config: DictConfig, devices: list[str]) -> _Job:
        """Start a job in a fresh process, which has not yet looked for GPUs.

        Not by :mod:`multiprocessing`: it would run the user's script again, and waits for a process that dies before
        it has read what it is to do.
        """
        import cloudpickle  # Hydra's state holds functions and twice imported classes, which plain pickle refuses

        from ddp_recipes.launchers.fork_server import python_path

        # Of each of its processes: the cores are for all jobs.
        environ = {"OMP_NUM_THREADS": str(self._threads), **os.environ, "PYTHONPATH": python_path()}
        if any(devices):
            environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        work = (self.hydra_context, config, self.task_function, Singleton.get_state())
        receiver, sender = Pipe(duplex=False)
        with sender, os.fdopen(os.memfd_create("job"), "wb") as file:
            file.write(cloudpickle.dumps(work))
            file.flush()
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", f"from {__name__} import work; work({file.fileno()}, {sender.fileno()})"],
                stdin=subprocess.DEVNULL,
                pass_fds=[file.fileno(), sender.fileno()],
                env=environ,
            )
        return _Job(config, process, receiver, devices)


def work(file: int, pipe: int) -> NoReturn:
    """Run the job that a file holds, in this process, and send its result, or what it raised to end the sweep."""
    import cloudpickle

    from ddp_recipes.runtime.process import die_with_parent, leave

    die_with_parent()
    with os.fdopen(file, "rb") as received, Connection(pipe, readable=False) as sender:
        received.seek(0)
        hydra_context, config, task_function, singletons = pickle.load(received)
        setup_globals()
        Singleton.set_state(singletons)
        try:
            outcome: Any = run_job(
                hydra_context=hydra_context,
                config=config,
                task_function=task_function,
                job_dir_key="hydra.sweep.dir",
                job_subdir_key="hydra.sweep.subdir",
            )
        except BaseException as error:  # noqa: BLE001 - it is raised again in the process that asked
            outcome = error
        sender.send_bytes(cloudpickle.dumps(outcome))
    leave(0)


def _needed(config: DictConfig, found: "Found") -> int:
    from ddp_recipes.config.compose import resolve
    from ddp_recipes.config.request import Request
    from ddp_recipes.devices import HOST
    from ddp_recipes.errors import RequestError

    task = OmegaConf.masked_copy(config, [str(name) for name in config if name != "hydra"])
    try:
        request = Request.of(resolve(task))
        return request.processes(found) * (request.num_devices if request.device_type(found) != HOST else 1)
    except RequestError:
        return 1  # the job raises it, too


def _result(job: _Job) -> JobReturn:
    try:
        outcome = pickle.loads(job.result.recv_bytes())
    except EOFError:
        outcome = _died(job.config, job.process)
    job.process.wait()
    if isinstance(outcome, BaseException):
        raise outcome
    assert isinstance(outcome, JobReturn)
    return outcome


def _died(config: DictConfig, process: subprocess.Popen[bytes]) -> JobReturn | BaseException:
    """Write that a job failed whose process exited without a result, print it, and return what comes of it."""
    from ddp_recipes.controller import SweepStopped
    from ddp_recipes.errors import RunFailed
    from ddp_recipes.launchers.reports import died
    from ddp_recipes.reporting.run_directory import leave_summary

    text = died(f"Job {config.hydra.job.num} (process {process.pid})", process.wait())
    directory = Path(config.hydra.sweep.dir, config.hydra.sweep.subdir)
    directory.mkdir(parents=True, exist_ok=True)
    leave_summary(directory, text.splitlines()[0], config.hydra.overrides.task)
    if OmegaConf.select(config, "sweep.on_failure") == "stop":
        return SweepStopped(RunFailed(text))
    print(text, file=sys.stderr, flush=True)
    return JobReturn(overrides=config.hydra.overrides.task, status=JobStatus.FAILED, _return_value=RunFailed(text))


def _stop(jobs: Sequence[_Job]) -> None:
    """Have what still runs stop, as a scheduler would: each job saves a checkpoint if it can."""
    for job in jobs:
        job.process.terminate()
    for job in jobs:
        with suppress(subprocess.TimeoutExpired):
            job.process.wait(AFTER_STOP_S)
        job.process.kill()
        job.process.wait()


def _visible_names(gpus: int) -> list[str]:
    """Return the names of the visible GPUs, as ``CUDA_VISIBLE_DEVICES`` has them: numbers or UUIDs.

    Of parts of GPUs (MIG) CUDA shows a process the first one alone; other processes can have the others.
    """
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    if gpus and named and all(name.startswith("MIG-") for name in named):
        return named
    return named[:gpus] if named else [str(number) for number in range(gpus)]
