"""The process that composes: it checks each job, gives it a directory and has it launched. Loads no torch by itself.

Here is also how a signal ends a sweep, where Hydra's launcher has jobs in processes of their own, too.
"""

import errno
import os
import signal
import stat
import sys
import threading
import time
import traceback
from argparse import Namespace
from collections.abc import Iterator, Sequence
from concurrent.futures import BrokenExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ddp_recipes.config import compose
from ddp_recipes.config.overrides import deleting_null
from ddp_recipes.config.request import Request
from ddp_recipes.config.settings import launcher_class
from ddp_recipes.config.translate import translated
from ddp_recipes.devices import chosen_here
from ddp_recipes.errors import Preempted, RecipeError, RequestError, RunFailed, printable
from ddp_recipes.launchers import environment
from ddp_recipes.launchers.base import Launcher, Resources
from ddp_recipes.launchers.local import run_here
from ddp_recipes.reporting import sweep
from ddp_recipes.reporting.run_directory import Summary, leave_summary, refuse_used
from ddp_recipes.runtime.job import ASKS_TO_STOP, Job
from ddp_recipes.runtime.process import (
    children,
    die_with_parent,
    handled_by,
    ignore_broken_pipe,
    is_running,
    name_of,
    set_name,
    stops,
)
from ddp_recipes.runtime.world import World
from ddp_recipes.strategies import ONE_PROCESS

if TYPE_CHECKING:
    from ddp_recipes._compat.hydra_ import Hydra


AFTER_SIGNAL_S = 30.0  # for jobs to save; their launcher ends them before
_STOPPED = "The sweep was stopped by {}. To go on, call it again with the same hydra.sweep.dir."
_JOB = "job "  # the name of a process begins so, as long as it runs one


class SweepStopped(BaseException):
    """Ends a sweep: Hydra takes an ``Exception`` for the job's own and starts the next one."""

    def __init__(self, reason: RecipeError) -> None:
        self.reason = reason


_stopped: BaseException | None = None  # in this process, to which joblib gives the next job


@contextmanager
def job_of(sweep: int, number: int) -> Iterator[None]:
    """Run a job; one in a process that a sweep, another process, has started can be told to stop, and ends with it."""
    global _stopped
    if os.getppid() != sweep or threading.current_thread() is not threading.main_thread():
        yield
        return
    if _stopped is not None:
        raise _stopped
    die_with_parent()
    ignore_broken_pipe()  # of the sweep's output, as in its own process
    set_name(f"{_JOB}{number}")
    try:
        with handled_by({signal.SIGTERM: signal.default_int_handler}):  # else joblib ends all where one dies of it
            yield
    except (SweepStopped, KeyboardInterrupt) as stop:
        _stopped = stop
        raise
    finally:
        set_name("between jobs")


def _stop(number: int, frame: FrameType | None) -> None:
    """Tell the jobs to stop, wait for them, and end the sweep."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # another Ctrl-C ends all at once
    name = signal.Signals(number).name
    if not (jobs := [child for child in children() if _has_job(child)]):
        raise KeyboardInterrupt(*([] if number == signal.SIGINT else [f"stopped by {name}"]))
    for job in jobs:
        os.kill(job, signal.SIGTERM)
    deadline = time.monotonic() + AFTER_SIGNAL_S
    while any(map(_has_job, jobs)) and time.monotonic() < deadline:
        time.sleep(0.05)
    raise SweepStopped(Preempted(_STOPPED.format(name)))


def _has_job(process: int) -> bool:
    return is_running(process) and name_of(process).startswith(_JOB)


NO_OBJECTIVE = (
    "Job {} ended without a value of checkpoint.monitor={}, which the sweeper is to optimise. There is one after the "
    "first validation: see trainer.max_steps, trainer.max_epochs, trainer.val_check_interval."
)


class Controller:
    """The one process that composes: its jobs are run by processes that it starts, or by its followers."""

    ended = False  # of this process: whether one has been closed, and its followers have exited

    def __init__(self, world: World | None, leaves: bool = False) -> None:
        self.world = world
        self._leaves = leaves  # with the end of its run
        self._process = os.getpid()
        self._summary: Summary = {}
        self.resources = Resources(world)
        self._chosen = chosen_here()
        self._base = ""  # the directory of the run, or of the whole sweep
        self._resumes = False  # whether torchrun has started it again: it goes on in the directory of its earlier start

    def run(self, argv: Sequence[str], config_path: str, config_name: str) -> Summary | list[Summary]:
        """Compose and run what the command line requests."""
        parser, args = compose.parse(argv)
        config_name = args.config_name or config_name
        config_path = args.config_path or config_path
        if compose.info_is_requested(args):
            compose.show_info(parser, args, config_path, config_name)
            return []
        if self.world is None and _expects_ranks(args):
            self.resources.server.start()
        with compose.session(config_path, args.config_dir) as hydra:
            with translated(hydra, config_name, args.overrides):
                args.overrides = deleting_null(hydra, config_name, args.overrides)
            config = None
            if not (args.multirun or "hydra.mode=MULTIRUN" in args.overrides):
                config = compose.single(hydra, config_name, args.overrides)
            if config is None:
                return self._sweep(hydra, config_name, args.overrides)
            with self._directory(config, *compose.directory_of(config, "hydra.run.dir")) as directory:
                config.hydra.run.dir = str(directory)
                compose.run(hydra, config, config_name, self.job)
        return self._summary

    def run_composed(self, config: DictConfig, directory: str | Path | None) -> Summary:
        """Run a config that is composed already, in the directory of the Hydra job that this is called in, if any."""
        config = OmegaConf.masked_copy(config, [str(name) for name in config if name != "hydra"])
        overrides, fresh, hydra = [], False, {}
        if HydraConfig.initialized():
            compose.separate_loggers(config)
            overrides = compose.overrides_of_job()
            hydra = compose.record()
            directory = directory or HydraConfig.get().runtime.output_dir
        elif directory is None:
            directory, fresh = datetime.now().strftime("outputs/%Y-%m-%d/%H-%M-%S"), True
        with self._directory(config, Path(directory).absolute(), fresh) as made:
            hydra["config.yaml"] = OmegaConf.to_yaml(config)
            return self._launch(
                Job(compose.resolve(config), made, hydra, overrides, last=self._leaves, base=self._base)
            )

    @contextmanager
    def _directory(self, config: DictConfig, path: Path, fresh: bool) -> Iterator[Path]:
        """Yield the directory, made, or that of the earlier start; nothing is left of a run that never began."""
        bound = 60.0
        with suppress(OmegaConfBaseException):  # it is refused later
            timeout_s = OmegaConf.select(config, "launcher.timeout_s")
            bound = timeout_s if isinstance(timeout_s, int | float) else bound
        if former := self.resources.former_directory(bound, fresh):
            path, fresh, self._resumes = Path(former), False, True
        directory, *made = make_directory(path, fresh)
        self._base = str(directory)
        try:
            yield directory
        except BaseException:
            remove_empty(made)
            raise

    def job(self, config: DictConfig) -> float | None:
        """Run one composed config in its Hydra job; return the monitored metric."""
        compose.separate_loggers(config)
        job = Job(
            compose.resolve(config),
            Path(HydraConfig.get().runtime.output_dir),
            {"config.yaml": OmegaConf.to_yaml(config), **compose.record()},
            compose.overrides_of_job(),
            last=self._leaves and HydraConfig.get().mode is RunMode.RUN,
            base=self._base,
        )
        self._summary = self._launch(job)
        objective: float | None = self._summary["objective"]
        return objective

    def _launch(self, job: Job) -> Summary:
        if self._resumes:
            job = job.resumed()
        job = replace(job, chosen=self._chosen)
        request = Request.of(job.config)
        if request.run.ckpt_path is None:
            refuse_used(job.directory, resumed=False)
        if request.run.plan:  # this process alone, however many were started
            return run_here(job)
        section = job.config["launcher"]
        try:
            launcher: Launcher = launcher_class(section)(request.launcher, self.resources)
            return launcher.launch(job)
        except (RecipeError, KeyboardInterrupt):
            raise
        except Exception as error:
            name = section.get("_target_", section["name"])
            raise RunFailed(f"The launcher, {name}, failed:\n{traceback.format_exc().rstrip()}") from error

    def _sweep(self, hydra: "Hydra", config_name: str, overrides: Sequence[str]) -> list[Summary]:
        """Run one job for each combination; however it ends, print the table of the jobs."""
        config = compose.for_sweep(hydra, config_name, overrides)
        self.resources.refuse_jobs_elsewhere(config.hydra.runtime.choices["hydra/launcher"])
        with self._directory(config, *compose.directory_of(config, "hydra.sweep.dir")) as directory:
            before = sweep.begun(directory)
            try:
                with handled_by(dict.fromkeys(ASKS_TO_STOP, _stop)):  # a job in this process has its own handlers
                    compose.multirun(hydra, config_name, overrides, str(directory), self.sweep_job)
            except SweepStopped as stop:
                raise _ended_by(stop.reason, sweep.begun(directory) != before) from None
            except RunFailed as error:  # of the first job that failed: each has printed its own already
                raise RunFailed("Some jobs of the sweep failed; the table above says which.") from error
            except RequestError as error:
                raise _ended_by(error, sweep.begun(directory) != before) from None
            except BrokenExecutor as error:  # of hydra/launcher=joblib, which has ended the other jobs
                raise RunFailed(sweep.broken(directory, str(error))) from error
            except Exception as error:  # a sweeper's own, such as Optuna's where no job has a value
                if not sweep.some_failed(directory):
                    raise
                ended = f"Then the sweeper ended with {type(error).__name__}: {error}"
                raise RunFailed(f"Some jobs of the sweep failed; the table above says which. {ended}") from error
            finally:
                sweep.report(directory, sys.stdout)
            if not (jobs := sweep.summaries(directory)):
                empty = [each for each in overrides if "glob(" in each] or overrides
                raise RequestError(f"The sweep has no job: {' '.join(empty)} comes to no value. Name what is there.")
        return jobs

    def sweep_job(self, config: DictConfig) -> float | None:
        """Run one job of a sweep; return its objective, at once if an earlier call of the same sweep finished it.

        A failure is the job's own, unless ``sweep.on_failure=stop``; a signal ends the sweep.
        """
        if self.world is None and environment.tasks(os.environ) > 1:
            return self._sweep_job_on_tasks(config)
        stops.clear()
        with job_of(self._process, HydraConfig.get().job.num):
            objective = self._sweep_job(config)
        if stops and os.getpid() == self._process:  # there was nothing left of the job to stop
            raise SweepStopped(Preempted(_STOPPED.format(stops[0])))
        return objective

    def _sweep_job(self, config: DictConfig) -> float | None:
        hydra = HydraConfig.get()
        directory, overrides = Path(hydra.runtime.output_dir), compose.overrides_of_job()
        if not Path(os.path.abspath(directory)).is_relative_to(os.path.abspath(hydra.sweep.dir)):
            raise SweepStopped(
                RequestError(
                    f"hydra.sweep.subdir={hydra.sweep.subdir} leaves hydra.sweep.dir. Choose one that does not."
                )
            )
        print(printable(f"\njob {hydra.job.num}: {' '.join(overrides)}"), flush=True)
        try:
            if (done := sweep.finished_before(directory, overrides)) is not None:
                print("finished before", flush=True)
                objective: float | None = done["objective"]
            else:
                if (directory / "config.yaml").exists():
                    config.ckpt_path = "auto"  # it was interrupted: it resumes
                objective = self.job(config)
        except Preempted as error:
            raise SweepStopped(error) from None
        except RecipeError as error:
            leave_summary(directory, str(error).strip().splitlines()[-1], overrides)
            if stops or config.sweep.on_failure == "stop":
                raise SweepStopped(error) from None
            print(printable(error), file=sys.stderr, flush=True)
            raise
        if objective is None and "direction" in hydra.sweeper:
            monitor = (done or self._summary).get("monitor") or config.checkpoint.monitor
            raise SweepStopped(RunFailed(NO_OBJECTIVE.format(hydra.job.num, monitor)))
        return objective

    def _sweep_job_on_tasks(self, config: DictConfig) -> float | None:
        """Run one job of a sweep where Hydra's launcher calls each of its tasks (submitit_slurm): rank 0's counts."""
        world = environment.join(os.environ)
        controller = Controller(world)  # this one is pickled again if the job is queued again
        if world is not None and not world.is_main:
            controller.resources.channel.follow()
            return None
        try:
            return controller._sweep_job(config)
        except SweepStopped as stop:
            raise stop.reason from None
        finally:
            controller.close(0)

    def close(self, exit_code: int) -> None:
        """End what was started for the run; the followers exit with this code."""
        Controller.ended = True
        self.resources.close(exit_code)


_INSIDE = 256  # bytes of the longest path that a run writes below its directory: that of a logger, with the host's name


def make_directory(path: Path, fresh: bool) -> list[Path]:
    """Make the directory of a run or a sweep; a ``fresh`` one that is taken gets ``_1``, ``_2``, ….

    Returns:
        It, and what was made for it: itself and parents, if they were not there, the innermost first.

    Raises:
        RequestError: it cannot be made, or not be written to.
    """
    if (found := _planted(path)) is not None:
        raise RequestError(f"{path} leads through {found}. Give a directory in a folder that is yours alone.")
    reason: str | None = None
    most = os.pathconf("/", "PC_PATH_MAX") - _INSIDE
    if (length := len(os.fsencode(path))) > most:
        raise RequestError(
            f"The path of the run directory has {length} characters, and it may have {most}, so that there is room for "
            f"what a run writes into it. Give a shorter one: hydra.run.dir, or hydra.sweep.dir of a sweep."
        )
    for number in range(1000):
        candidate = path.with_name(f"{path.name}_{number}") if fresh and number else path
        made: list[Path] = []
        try:
            for folder in reversed([each for each in (candidate, *candidate.parents) if not each.exists()]):
                folder.mkdir()
                made.insert(0, folder)
            if fresh and candidate not in made:
                continue
            if os.access(candidate, os.W_OK | os.X_OK) and candidate.is_dir():
                return [candidate, *made]
            reason = os.strerror(errno.EACCES if candidate.is_dir() else errno.ENOTDIR)
            break
        except OSError as error:
            remove_empty(made)
            reason = error.strerror
            if not isinstance(error, (FileExistsError, FileNotFoundError)):
                break
            dangling = (each for each in (candidate, *candidate.parents) if each.is_symlink() and not each.exists())
            if (link := next(dangling, None)) is not None:  # else another run made or removed a part of it
                reason = f"{link} is a symbolic link to {os.readlink(link)}, which is not there"
                break
    raise RequestError(
        f"{path} cannot be the run directory: {reason}. Start from a folder that can be written to, or give another "
        f"directory: hydra.run.dir=/tmp/run, or hydra.sweep.dir=/tmp/sweep of a sweep."
    )


def _planted(path: Path) -> str | None:
    """Return what another user has put where all may write, if a path leads through it: a link, or a folder for all."""
    path = path.absolute()
    for part in (*reversed(path.parents), path):
        try:
            found, above = part.lstat().st_mode, part.parent.stat().st_mode
            user = part.lstat().st_uid
        except OSError:
            return None  # not there, nor what is below it
        trap = stat.S_ISLNK(found) or part == path or found & stat.S_IWOTH
        if trap and above & stat.S_IWOTH and user not in (0, os.geteuid()):
            return f"{part}, which another user (number {user}) put there"
    return None


def remove_empty(made: Sequence[Path]) -> None:
    """Remove directories that this process made, the innermost first, as far as nothing was written to them."""
    for path in made:
        if [inside.name for inside in path.iterdir()] == ["multirun.yaml"]:
            (path / "multirun.yaml").unlink()  # Hydra's record of a sweep of which no job began
        try:
            path.rmdir()
        except OSError:
            return


def _ended_by(reason: RecipeError, some_ran: bool) -> RecipeError:
    """Return how a sweep ends for this: what is refused after other jobs ran is a failure, for there they are."""
    return RunFailed(str(reason)) if some_ran and isinstance(reason, RequestError) else reason


def _expects_ranks(args: Namespace) -> bool:
    """Guess from the command line whether ranks will be started here: a wrong guess costs a little, not the run."""
    alone = (*(f"strategy={name}" for name in ONE_PROCESS), "launcher.nproc_per_node=1", "plan=true")
    elsewhere = ("launcher=slurm", "launcher.start_method=spawn")
    return not args.multirun and not {*alone, *elsewhere}.intersection(args.overrides)
