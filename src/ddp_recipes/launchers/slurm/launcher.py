"""Submits a run to Slurm through submitit. Every task of the job is one rank; this process waits, or exits.

Slurm's files and the job's id are in ``slurm/`` in the run directory. So are the reports of the ranks, which works with
and without Slurm's accounting, and outlives a job that starts again. Loads no torch.
"""

import io
import os
import re
import secrets
import shlex
import shutil
import stat
import sys
import time
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from ddp_recipes.config.keys import Count, Range
from ddp_recipes.config.request import Request
from ddp_recipes.config.settings import LauncherSettings
from ddp_recipes.devices import HOST
from ddp_recipes.errors import RequestError
from ddp_recipes.launchers import environment
from ddp_recipes.launchers.base import Resources
from ddp_recipes.launchers.reports import Death, Outcome, decide
from ddp_recipes.launchers.slurm.task import STARTED_AGAIN, Attempt, State, Task, read_reports
from ddp_recipes.reporting.run_directory import Summary, locked, write_text
from ddp_recipes.runtime.job import Job


@dataclass(frozen=True, kw_only=True)
class SlurmSettings(LauncherSettings):
    """``launcher.*`` of ``launcher=slurm``."""

    name: Literal["slurm"]
    gpus_per_node: Count | None
    cpus_per_task: Count | None
    time_min: Count
    partition: str | None
    account: str | None
    sbatch: dict[str, Any]
    wait: bool
    signal_s: Annotated[int, Range(1, 65535)]
    requeue: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("max_restarts", "replace_ranks"):
            if number := getattr(self, name):
                raise RequestError(
                    f"launcher.{name}={number} is not taken by launcher=slurm. Leave it 0: with launcher.requeue=true "
                    f"Slurm starts the job again after a preemption or the loss of a node."
                )
        if self.signal_s + 60 >= 60 * self.time_min:  # Slurm may send it a minute early
            raise RequestError(
                f"launcher.signal_s={self.signal_s} leaves no time to train in launcher.time_min={self.time_min}. "
                f"Allowed: more than a minute less than the job's time."
            )

        lines = {"partition": self.partition, "account": self.account}
        lines |= {f"sbatch.{name}": f"{name}={value}" for name, value in self.sbatch.items()}
        for name, line in lines.items():
            if not str(line).isprintable():  # the next line of the job's script would be a command
                raise RequestError(f"launcher.{name}={line!r} is not one line of printable text, as Slurm needs it.")

    def gpus_of_node(self) -> int | None:
        return self.gpus_per_node


SHORTEST_POLL_S, LONGEST_POLL_S = 0.5, 10.0  # Slurm's controller is shared: the longer nothing changes, the rarer

# USR1 ends a process that has no handler for it. A rank that still gets ready has nothing to save, and ignores it.
_IGNORES_USR1 = """sh -c 'trap "" USR1; exec "$0" "$@"'"""

# Options of sbatch that have a key here, or are needed here.
_KEYS = {
    "nodes": "launcher.nnodes",
    "ntasks": "launcher.nnodes and launcher.nproc_per_node",
    "ntasks_per_node": "launcher.nproc_per_node",
    "gpus_per_node": "launcher.gpus_per_node",
    "cpus_per_task": "launcher.cpus_per_task",
    "time": "launcher.time_min",
    "partition": "launcher.partition",
    "account": "launcher.account",
    "signal": "launcher.signal_s",
    "requeue": "launcher.requeue",
    "no_requeue": "launcher.requeue",
    "output": "nothing: logs are in slurm/ in the run directory",
    "error": "nothing: logs are in slurm/ in the run directory",
    "array": "a sweep (-m): each of its jobs is submitted",
}


@dataclass(frozen=True)
class SlurmLauncher:
    """Submits a job, and waits for it unless ``launcher.wait=false``."""

    settings_class: ClassVar[type[LauncherSettings]] = SlurmSettings
    settings: SlurmSettings
    resources: Resources

    def launch(self, job: Job) -> Summary:
        """Return rank 0's summary once the job has ended, or its number at once; an interrupt ends only the waiting."""
        self.resources.refuse_started_ranks("slurm")
        _refuse_others(job.directory)
        settings, folder = self.settings, job.directory / "slurm"
        if "%" in str(job.directory):
            raise RequestError(
                f"{job.directory}: Slurm fills in %-patterns in the names of its files, so nobody would find them. "
                f"Choose a hydra.run.dir (of a sweep: hydra.sweep.dir, hydra.sweep.subdir) without %."
            )
        number, made = _submit(job, settings, _tasks_per_node(Request.of(job.config), settings), folder)
        print(f"Slurm job {number}, in {job.directory}", flush=True)
        where = f"squeue -j {number} shows it, what it prints is in {folder}, and scancel {number} ends it."
        if not settings.wait:
            print(f"Not waiting for it: {where}", flush=True)
            submitted = {"status": "submitted", "slurm_job_id": number}
            return {**submitted, "run_directory": str(job.directory), "objective": None}
        try:
            state = _wait(number, folder)
        except KeyboardInterrupt:
            print(f"\nSlurm job {number} goes on without this process: {where}", file=sys.stderr, flush=True)
            raise
        try:
            return _outcome(number, state, folder).conclude(job)
        except RequestError:
            with suppress(RequestError), locked(job.directory):  # refused runs leave nothing
                if made and _job_in(folder) == number and not (job.directory / "config.yaml").exists():
                    shutil.rmtree(folder)
            raise


def _tasks_per_node(request: Request, settings: SlurmSettings) -> int:
    """Return how many ranks to start on a node: as many as it has GPUs for, else no more than one replica needs."""
    requested, gpus, k = settings.nproc_per_node, settings.gpus_per_node, request.num_devices
    fit = None if gpus is None or settings.device == HOST else gpus // k
    if requested != "auto":
        count = int(requested)
    elif fit is None:
        count = -(-request.strategy.processes_per_replica // settings.nnodes)
    else:
        count = min(fit, request.strategy.max_world_size or fit)
    if not count or (fit is not None and count > fit):
        raise RequestError(
            f"launcher.nproc_per_node={requested} with model.num_devices={k} does not fit on launcher.gpus_per_node="
            f"{gpus}: {fit} replica(s) do. Request more GPUs a node, or fewer processes."
        )
    request.strategy.check_world_size(settings.nnodes * count)
    return count


def _refuse_others(path: Path) -> None:
    """Refuse a directory that others may have written to, for the job will run what it finds there."""
    if not str(path).isprintable():  # it stands in the job's script
        raise RequestError(f"hydra.run.dir={str(path)!r} is not one line of printable text, as Slurm needs it.")
    found = path.stat()
    if found.st_uid not in (0, os.geteuid()) or found.st_mode & stat.S_IWOTH:
        raise RequestError(
            f"{path} is not yours alone (user number {found.st_uid}, mode {found.st_mode & 0o777:o}), and a Slurm job "
            f"runs what lies there. Choose another hydra.run.dir, or take the rights of others: chmod o-w {path}."
        )


def _submit(job: Job, settings: SlurmSettings, tasks_per_node: int, folder: Path) -> tuple[str, bool]:
    """Submit the job, in a directory that no other one has; return its number, and whether that made the folder."""
    if find_spec("submitit") is None:
        raise RequestError("launcher=slurm needs submitit, which is not installed: pip install 'ddp-recipes[slurm]'.")
    if shutil.which("sbatch") is None or shutil.which("srun") is None:
        raise RequestError(
            "launcher=slurm needs sbatch and srun, which are not on the PATH. Run it on a login node of the cluster "
            "(or load its Slurm module), or use launcher=local on this machine."
        )
    options = _sbatch_options(settings)
    with locked(job.directory):
        _refuse_queued(folder)
        existed = folder.exists()
        try:
            number = _sbatch(job, settings, tasks_per_node, folder, options)
        except Exception:
            if not existed:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        write_text(folder / "job_id", f"{number}\n")
        return number, not existed


def _job_in(folder: Path) -> str:
    """Return the number of the job that was submitted last from here; empty if there is none."""
    path = folder / "job_id"
    return path.read_text(encoding="utf-8").strip() if path.exists() else ""


def _refuse_queued(folder: Path) -> None:
    """Refuse the directory of a job that is still to run, or runs."""
    number = _job_in(folder)
    if number and not (state := State.ask(number, State("not known"))).ended:
        raise RequestError(
            f"{folder.parent} belongs to Slurm job {number}, whose state is: {state}. Wait for it, end it (scancel "
            f"{number}), or choose another hydra.run.dir."
        )


def _sbatch(job: Job, settings: SlurmSettings, tasks_per_node: int, folder: Path, options: dict[str, Any]) -> str:
    """Have submitit write the job's files and call sbatch; return the job's number."""
    import submitit

    try:
        python = f"{_IGNORES_USR1} {shlex.quote(sys.executable)}"
        executor = submitit.SlurmExecutor(folder=folder, max_num_timeout=0, python=python)
        executor.update_parameters(
            job_name=options.pop("job_name", "ddp_recipes"),
            nodes=settings.nnodes,
            ntasks_per_node=tasks_per_node,
            time=settings.time_min,
            gpus_per_node=settings.gpus_per_node,
            cpus_per_task=settings.cpus_per_task,
            partition=settings.partition,
            account=settings.account,
            srun_args=["--kill-on-bad-exit=1"],  # no rank outlives one that is killed
            additional_parameters=options,
        )
        task = Task(job, settings.requeue, tuple(os.path.abspath(path) for path in sys.path))
        os.environ.setdefault(
            environment.KEY_VARIABLE, secrets.token_hex(32)
        )  # Slurm hands it down to the ranks, to nobody else
        with redirect_stderr(io.StringIO()):  # submitit prints what it raises, too
            submitted = executor.submit(task)
    except (submitit.core.utils.FailedJobError, submitit.core.utils.FailedSubmissionError) as error:
        reasons = re.findall(r"^sbatch: (?:error: )?(.*)", str(error), re.MULTILINE)
        raise RequestError(
            f"sbatch refused the job: {'; '.join(reasons) or error}. Change launcher.partition, launcher.account, … or "
            f"launcher.sbatch, which takes any option of sbatch by name."
        ) from None
    return str(submitted.job_id)


def _sbatch_options(settings: SlurmSettings) -> dict[str, Any]:
    """Return the options that submitit has no parameter for; the user's own come last."""
    # USR1, and to the ranks only: submitit's own signal would requeue the job without a checkpoint of this run.
    options: dict[str, Any] = {
        "signal": f"USR1@{settings.signal_s}",
        "requeue" if settings.requeue else "no_requeue": True,
    }
    for name, value in settings.sbatch.items():
        name = str(name).replace("-", "_")
        if name in _KEYS:
            raise RequestError(f"launcher.sbatch.{name} is not taken. Use {_KEYS[name]}.")
        if value not in (None, False):
            options[name] = value
    return options


def _wait(number: str, folder: Path) -> State:
    """Print the state of a job, and what its rank 0 prints, until it has ended; return its last state."""
    shown, state, since = "", State(), time.monotonic()
    log = _Tail(folder / f"{number}_0_log.out")
    while True:
        state = State.ask(number, state)
        if str(state) != shown:
            shown, since = str(state), time.monotonic()
            print(f"Slurm job {number}: {shown}", flush=True)
        log.show()
        if state.ended:
            return state
        time.sleep(min(LONGEST_POLL_S, SHORTEST_POLL_S + (time.monotonic() - since) / 20))


@dataclass
class _Tail:
    """Prints what is added to a log, but for submitit's own lines."""

    path: Path
    _seen: int = 0
    _rest: bytes = field(default=b"")

    def show(self) -> None:
        try:
            with self.path.open("rb") as file:
                file.seek(self._seen)
                new = file.read()
        except FileNotFoundError:
            return
        self._seen += len(new)
        *lines, self._rest = (self._rest + new).split(b"\n")
        for line in lines:
            if not line.startswith(b"submitit "):
                print(line.decode(errors="replace"), flush=True)


def _outcome(number: str, state: State, folder: Path) -> Outcome:
    """Return what became of a job that has ended, by its ranks' reports and by its state."""
    reports = read_reports(folder, Attempt(number, state.restarts))
    log = folder / f"{number}_0_log.err"
    deaths = []
    if state.name in ("FAILED", "OUT_OF_MEMORY") and (killed := _killed(log, set(reports))):
        rank, how = killed
        where = f"{folder}/{number}_{rank}_log.err"
        deaths = [Death(rank, f"Rank {rank} of Slurm job {number} exited without a traceback: {how}. See {where}")]
    message = f"Slurm job {number} ended ({state}) before its ranks did. What they printed is in {folder}:"
    return decide(reports, deaths, otherwise="\n".join([message, *_last_lines(log)]))


def _killed(log: Path, reported: set[int]) -> tuple[int, str] | None:
    """Return the rank that died first and how, as srun printed it, if it died without a report."""
    text = "\n".join(_last_lines(log, 10_000)).rpartition(STARTED_AGAIN)[2]
    for line in text.splitlines():
        match = re.match(r"srun: error: \S+: tasks? (\d+)[\d,-]*: (.*)", line)
        if match is not None:
            return None if int(match[1]) in reported else (int(match[1]), match[2])
    return None


def _last_lines(path: Path, count: int = 20) -> list[str]:
    return path.read_text(errors="replace").splitlines()[-count:] if path.exists() else []
