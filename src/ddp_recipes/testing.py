"""Run recipes on several ranks in a test: real processes and real gloo, without paying for imports again.

Ranks are forked from the process of the tests. Torch must not have run on several threads before, which a fork does not
survive: call ``torch.set_num_threads(1)`` in ``conftest.py``.
"""

import faulthandler
import gc
import multiprocessing
import os
import re
import select
import signal
import socket
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from torch.distributed import FileStore, Store

from ddp_recipes import rank
from ddp_recipes._compat.torch_ import load_what_ddp_needs
from ddp_recipes.config import compose
from ddp_recipes.config.overrides import deleting_null, spelled_out
from ddp_recipes.config.translate import translated
from ddp_recipes.errors import RecipeError, RequestError
from ddp_recipes.main import CONF
from ddp_recipes.reporting.run_directory import Summary
from ddp_recipes.runtime.job import Job
from ddp_recipes.runtime.messages import Messages
from ddp_recipes.runtime.process import die_with_parent
from ddp_recipes.runtime.world import World

load_what_ddp_needs()  # once here, not in each rank


# --- composing -------------------------------------------------------------------------------------------------------


def make_job(
    overrides: Sequence[str] = (),
    directory: Path | str | None = None,
    *,
    config_dir: str | None = None,
    config_name: str = "train",
) -> Job:
    """Compose what ``train.py`` would with these overrides.

    Args:
        directory: the run directory; a new temporary folder if left out.
        config_dir, config_name: as ``--config-dir`` and ``--config-name``.
    """
    return Job(
        compose.resolve(_composed(tuple(spelled_out(overrides)), config_dir, config_name)),
        Path(directory or tempfile.mkdtemp(prefix="ddp_recipes_")).absolute(),
        overrides=list(overrides),
    )


STACKS_S = 5.0  # a rank that is aborted has to write its stacks
OTHERS_S = 5.0  # what else went wrong is waited for so long, once a rank has failed
# A new value for a key that is there, which chooses no option of a group.
_VALUE = re.compile(r"(\w+(?:\.\w+)+|seed|mode|ckpt_path|weights_from)=(?!.*[,{\[$])(.*)", re.DOTALL)


def _composed(overrides: tuple[str, ...], config_dir: str | None, config_name: str) -> DictConfig:
    """Return a composed config; those that differ only in values are composed by Hydra once.

    A user's own folder of configs may change meanwhile, and is read each time.
    """
    if config_dir is not None:
        return _compose(overrides, config_dir, config_name)
    values = [override for override in overrides if _VALUE.fullmatch(override)]
    config = deepcopy(_compose_once(tuple(each for each in overrides if each not in values), config_name))
    for value in OverridesParser.create().parse_overrides(values):
        if OmegaConf.select(config, value.key_or_group, default=value) is value:  # no such key, or none with a value
            return _compose(overrides, None, config_name)
        OmegaConf.update(config, value.key_or_group, value.value())
    return config


def _compose(overrides: Sequence[str], config_dir: str | None, config_name: str) -> DictConfig:
    with compose.session(CONF, config_dir) as hydra:
        with translated(hydra, config_name, overrides):
            overrides = deleting_null(hydra, config_name, overrides)
        config = compose.compose(hydra, config_name, overrides)
    return OmegaConf.masked_copy(config, [str(name) for name in config if name != "hydra"])


@cache
def _compose_once(overrides: tuple[str, ...], config_name: str) -> DictConfig:
    return _compose(overrides, None, config_name)


# --- running ---------------------------------------------------------------------------------------------------------


def run_recipe(
    overrides: Sequence[str] = (),
    world_size: int = 1,
    directory: Path | str | None = None,
    *,
    config_dir: str | None = None,
    config_name: str = "train",
    timeout_s: float = 120,
    ranks: "WarmRanks | None" = None,
) -> Summary:
    """Run a recipe on so many forked ranks and return rank 0's summary.

    Args:
        ranks: those to run on; new ones if left out.

    Raises:
        Exception: what the first rank raised, rank 0 first.
        TimeoutError: a rank did not end in time.
    """
    size = f"launcher.nproc_per_node={world_size}"
    job = make_job([*overrides, size], directory, config_dir=config_dir, config_name=config_name)
    if ranks is not None:
        return ranks.run(job, world_size, timeout_s)
    summary: Summary = on_ranks(lambda world, store: _run(job, world, store), world_size, timeout_s=timeout_s)[0]
    return summary


def _run(job: Job, world: World, store: Store | None) -> Summary:
    return rank.run(job, world, None if store is None else Messages(store, private=True))


def on_ranks(function: Callable[[World, Store | None], Any], world_size: int, *, timeout_s: float = 120) -> list[Any]:
    """Call ``function(world, store)`` on so many forked ranks; return what each one returned, in rank order.

    What comes back is pickled, over an inherited pipe. The store is a file without a name; of one rank it is ``None``.

    Raises:
        Exception: what the first rank raised.
        TimeoutError: a rank did not end in time; all are killed, and write their stacks to stderr.
    """
    fork = multiprocessing.get_context("fork")
    with os.fdopen(os.memfd_create("ddp_recipes")) as store_file:
        pipes = [fork.Pipe(duplex=False) for _ in range(world_size)]
        processes = [
            fork.Process(
                target=_on_rank,
                args=(function, World(number, world_size, number, world_size), store_file.fileno(), pipe),
            )
            for number, (_, pipe) in enumerate(pipes)
        ]
        for process in processes:
            process.start()
    for _, pipe in pipes:
        pipe.close()
    try:
        return [_outcome(number, receiver, timeout_s) for number, (receiver, _) in enumerate(pipes)]
    except TimeoutError:
        _abort(process.pid for process in processes if process.pid is not None)
        raise
    finally:
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()


def _on_rank(
    function: Callable[[World, Store | None], Any],
    world: World,
    store_file: int,
    pipe: Connection,
) -> None:
    _begin()
    pipe.send(_attempt(function, world, store_file))
    pipe.close()
    os._exit(0)


def _begin() -> None:
    """Make a rank of this fork."""
    # A store that the parent left to collect would wait, in its destructor, for a thread that only the parent has.
    gc.freeze()
    faulthandler.enable(2)  # shows where a rank is that is aborted because it did not end
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    # A fork's first use of torch's thread pool replaces it, which two threads at once (autograd's) do not survive.
    torch.set_num_threads(torch.get_num_threads())


def _attempt(function: Callable[[World, Store | None], Any], world: World, store_file: int) -> tuple[str, Any]:
    """Call a function as a rank; return whether it ``returned`` or ``raised``, and what."""
    try:
        store = FileStore(f"/proc/self/fd/{store_file}") if world.world_size > 1 else None
        return "returned", function(world, store)
    except RecipeError as error:
        return "raised", error
    except BaseException:  # noqa: BLE001 - raised again in the process that asked
        return "raised", RuntimeError(f"Rank {world.rank} failed:\n{traceback.format_exc()}")


def _abort(processes: Iterable[int]) -> None:
    """End ranks, each with the stacks of its threads on stderr."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGABRT)
            end = os.pidfd_open(process)
            select.select([end], [], [], STACKS_S)
            os.close(end)


def _outcome(number: int, receiver: Connection, timeout_s: float) -> Any:
    if not receiver.poll(timeout_s):
        raise TimeoutError(f"Rank {number} did not end within {timeout_s:g} seconds.")
    try:
        kind, value = receiver.recv()
    except EOFError:
        raise RuntimeError(f"Rank {number} exited without a report.") from None
    if kind == "raised":
        raise value
    return value


# --- warm ranks ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Order:
    """A job for a warm rank, and what of the process of the tests it takes for its time."""

    job: Job
    world: World
    environ: Mapping[str, str]
    folder: str
    path: Sequence[str]
    umask: int
    filters: Sequence[tuple[str, str | None, type[Warning], str | None, int]]


@dataclass(frozen=True)
class _Warm:
    """A rank that waits for jobs."""

    process: int
    channel: socket.socket
    connection: Connection


class WarmRanks:
    """Ranks that stay: each job has a group of its own, and nothing is forked or loaded for it.

    They take over environment, current folder, umask, module path, filters of warnings and open output, and import a
    user's modules anew for each job. What a test has changed in modules that are loaded does not reach them: use
    :func:`on_ranks` there. Ranks on which something failed are not used again.
    """

    def __init__(self) -> None:
        # A process keeps its number: torch remembers by the shape of a mesh which rows of a tensor are its own.
        self._ranks: dict[int, _Warm] = {}

    @property
    def processes(self) -> set[int]:
        """The ids of the ranks' processes."""
        return {warm.process for warm in self._ranks.values()}

    def run(self, job: Job, world_size: int, timeout_s: float = 120) -> Summary:
        """Run a job on so many ranks; return rank 0's summary.

        Raises:
            Exception: what the first rank raised, rank 0 first.
            TimeoutError: a rank did not end in time; all write their stacks to stderr.
        """
        numbers, filters = range(world_size), [_plain(each) for each in warnings.filters]
        for number in numbers:
            if number not in self._ranks:
                self._ranks[number] = _start()
        os.umask(umask := os.umask(0))
        here = (dict(os.environ), os.getcwd(), list(sys.path), umask, filters)
        try:
            with os.fdopen(os.memfd_create("ddp_recipes")) as store_file:
                for number in numbers:
                    warm = self._ranks[number]
                    socket.send_fds(warm.channel, [b"x"], [1, 2, store_file.fileno()])
                    warm.connection.send(_Order(job, World(number, world_size, number, world_size), *here))
                return self._summary(numbers, timeout_s)
        except RequestError:
            raise
        except BaseException as error:
            if isinstance(error, TimeoutError):
                _abort(self._ranks[number].process for number in numbers)
            self._end(numbers)
            raise

    def _summary(self, numbers: Sequence[int], timeout_s: float) -> Summary:
        """Wait for all; return rank 0's summary, or raise what it raised, with what the others did for a failure."""
        outcomes: list[Summary] = []
        try:
            for number in numbers:
                outcomes.append(_outcome(number, self._ranks[number].connection, timeout_s))
        except RequestError:  # once the others have refused the job, too
            for number in numbers[1:]:
                try:
                    _outcome(number, self._ranks[number].connection, timeout_s)
                except RequestError:
                    pass
                except Exception:  # noqa: BLE001 - it lost rank 0 while they met
                    self._end([number])
            raise
        except Exception as error:  # a rank may have failed of what a later one did
            for number in numbers[len(outcomes) + 1 :]:
                try:
                    _outcome(number, self._ranks[number].connection, OTHERS_S)
                except Exception as other:  # noqa: BLE001 - it is told beside the first
                    error.add_note(f"{other}")
            raise
        return outcomes[0]

    def close(self) -> None:
        """End all ranks."""
        self._end(self._ranks)

    def _end(self, numbers: Iterable[int]) -> None:
        for number in [*numbers]:
            warm = self._ranks.pop(number)
            warm.connection.close()
            warm.channel.close()
            os.kill(warm.process, signal.SIGKILL)
            os.waitpid(warm.process, 0)


def _plain(entry: Any) -> tuple[str, str | None, type[Warning], str | None, int]:
    """Return a filter of warnings with texts in place of patterns, as ``filterwarnings`` takes it."""
    action, message, category, module, line = entry
    return action, getattr(message, "pattern", message), category, getattr(module, "pattern", module), line


def _start() -> _Warm:
    ours, theirs = socket.socketpair()
    process = os.fork()
    if process == 0:
        try:
            ours.close()
            _serve(theirs)
        finally:
            os._exit(1)
    theirs.close()
    return _Warm(process, ours, Connection(os.dup(ours.fileno())))


def _serve(channel: socket.socket) -> NoReturn:
    """Run jobs until nobody is there to send one."""
    die_with_parent()
    _begin()
    _leave_files(keep=channel.fileno())
    for stopping in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stopping, signal.SIG_DFL)
    # Not what the tests have put there, but the files that come with each job.
    sys.stdout, sys.stderr = (os.fdopen(fd, "w", buffering=1, closefd=False) for fd in (1, 2))
    connection, modules = Connection(os.dup(channel.fileno())), set(sys.modules)
    while True:
        message, fds, *_ = socket.recv_fds(channel, 1, 3)
        if not message:
            os._exit(0)
        order: _Order = connection.recv()
        for fd, number in zip(fds, (1, 2), strict=False):
            os.dup2(fd, number)
        _take_over(order)
        outcome = _attempt(lambda world, store: _run(order.job, world, store), order.world, fds[2])  # noqa: B023
        sys.stdout.flush()
        connection.send(outcome)
        del outcome
        for fd in fds:
            os.close(fd)
        _forget(sys.modules.keys() - modules)
        gc.collect()
        gc.freeze()  # else the next collection looks at all of torch again, where the job has forked data workers


def _leave_files(keep: int) -> None:
    """Close what the process of the tests has open: a lock, say, that a test holds.

    The numbers stay taken, for objects that came with this fork may close them yet.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number not in (keep, nothing):
            with suppress(OSError):  # of the listing itself
                os.fstat(number)
                os.dup2(nothing, number)


def _take_over(order: _Order) -> None:
    """Put this process where the tests' own is."""
    os.environ.clear()
    os.environ.update(order.environ, GLOO_SOCKET_IFNAME="lo")
    os.chdir(order.folder)
    sys.path[:] = order.path
    os.umask(order.umask)
    warnings.resetwarnings()
    for action, message, category, module, line in reversed(order.filters):
        warnings.filterwarnings(action, message or "", category, module or "", line)  # type: ignore[arg-type]


def _forget(names: Iterable[str]) -> None:
    """Unload what a job imported from elsewhere than the installed packages: another job's may have the same name."""
    for name in list(names):
        file = getattr(sys.modules[name], "__file__", None) or ""
        if not file.startswith((sys.prefix, sys.base_prefix)) and not name.startswith("ddp_recipes"):
            del sys.modules[name]
