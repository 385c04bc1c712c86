"""Run recipes on several forked ranks in a test: real processes and real gloo, without paying for imports again.

Torch must not have run on several threads before, which a fork does not survive: call ``torch.set_num_threads(1)`` in
``conftest.py``.
"""

import gc
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch.distributed import FileStore, Store

from ddp_recipes import rank
from ddp_recipes._compat.ddp import load_what_ddp_needs
from ddp_recipes.config import compose
from ddp_recipes.config.overrides import spelled_out
from ddp_recipes.config.request import resolve
from ddp_recipes.errors import RecipeError
from ddp_recipes.main import CONF
from ddp_recipes.reporting.run_directory import Summary
from ddp_recipes.runtime.job import Job
from ddp_recipes.runtime.messages import Messages
from ddp_recipes.runtime.world import World

load_what_ddp_needs()  # once here, not in each rank


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
    with compose.session(CONF, config_dir) as hydra:
        config = compose.compose(hydra, config_name, spelled_out(overrides))
    config = OmegaConf.masked_copy(config, [str(name) for name in config if name != "hydra"])
    return Job(
        resolve(config),
        Path(directory or tempfile.mkdtemp(prefix="ddp_recipes_")).absolute(),
        overrides=list(overrides),
    )


def run_recipe(
    overrides: Sequence[str] = (),
    world_size: int = 1,
    directory: Path | str | None = None,
    *,
    config_dir: str | None = None,
    config_name: str = "train",
    timeout_s: float = 120,
) -> Summary:
    """Run a recipe on so many forked ranks and return rank 0's summary.

    Raises:
        Exception: what the first rank raised, rank 0 first.
        TimeoutError: a rank did not end in time.
    """
    ranks = f"launcher.nproc_per_node={world_size}"
    job = make_job([*overrides, ranks], directory, config_dir=config_dir, config_name=config_name)

    def run(world: World, store: Store | None) -> Summary:
        return rank.run(job, world, None if store is None else Messages(store, private=True))

    summary: Summary = on_ranks(run, world_size, timeout_s=timeout_s)[0]
    return summary


def on_ranks(function: Callable[[World, Store | None], Any], world_size: int, *, timeout_s: float = 120) -> list[Any]:
    """Call ``function(world, store)`` on so many forked ranks; return what each one returned, in rank order.

    What comes back is pickled, over an inherited pipe. The store is a file without a name; of one rank it is ``None``.

    Raises:
        Exception: what the first rank raised.
        TimeoutError: a rank did not end in time; all are killed.
    """
    fork = multiprocessing.get_context("fork")
    with os.fdopen(os.memfd_create("ddp_recipes")) as meeting:
        pipes = [fork.Pipe(duplex=False) for _ in range(world_size)]
        processes = [
            fork.Process(
                target=_on_rank,
                args=(function, World(number, world_size, number, world_size), meeting.fileno(), pipe),
            )
            for number, (_, pipe) in enumerate(pipes)
        ]
        for process in processes:
            process.start()
    for _, pipe in pipes:
        pipe.close()
    try:
        return [_outcome(number, receiver, timeout_s) for number, (receiver, _) in enumerate(pipes)]
    finally:
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()


def _on_rank(
    function: Callable[[World, Store | None], Any],
    world: World,
    meeting: int,
    pipe: Connection,
) -> None:
    # A store that the parent left to collect would wait, in its destructor, for a thread that only the parent has.
    gc.freeze()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    # A fork's first use of torch's thread pool replaces it, which two threads at once (autograd's) do not survive.
    torch.set_num_threads(torch.get_num_threads())
    try:
        store = FileStore(f"/proc/self/fd/{meeting}") if world.world_size > 1 else None
        outcome: tuple[str, Any] = ("returned", function(world, store))
    except RecipeError as error:
        outcome = ("raised", error)
    except BaseException:
        outcome = ("raised", RuntimeError(f"Rank {world.rank} failed:\n{traceback.format_exc()}"))
    pipe.send(outcome)
    pipe.close()
    os._exit(0)


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
