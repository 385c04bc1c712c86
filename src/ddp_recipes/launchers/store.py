"""Where the ranks of a run meet. Loads torch."""

import os
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial

from torch.distributed import Store, TCPStore, rendezvous

from ddp_recipes._compat.messages import address_in_use
from ddp_recipes.errors import RequestError
from ddp_recipes.launchers.environment import find_key
from ddp_recipes.runtime.messages import Messages
from ddp_recipes.runtime.world import World

TIMEOUT = timedelta(minutes=30)
AGAIN = timedelta(seconds=2)  # for another connection


def agent_holds_store() -> bool:
    """Whether the store is torchrun's, and so outlives every rank."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def at_address(world: World, environ: Mapping[str, str], timeout: timedelta = TIMEOUT) -> Messages:
    """Return the messages of the run whose ranks meet at ``MASTER_ADDR:MASTER_PORT``; wait for rank 0 so long.

    Raises:
        RequestError: another program, or another run, is there.
        RunFailed: rank 0 has another key.
    """
    run, agent = _name(world, environ), agent_holds_store()
    messages = Messages(
        _store(world, timeout),
        find_key(environ),
        "ddp_recipes",
        holders=list if agent or world.is_main else lambda: [0],
        connect=partial(_store, replace(world, rank=max(1, world.rank)), AGAIN),
    )
    if agent:  # for ranks that it started, also once they are fewer or more
        return messages.under(run)
    if world.is_main:
        messages.set("run", run)
    elif (there := messages.get("run", timeout.total_seconds())) != run:
        raise RequestError(
            f"The ranks at {environ['MASTER_ADDR']}:{environ['MASTER_PORT']} are of another run: {there}. This is rank "
            f"{world.rank} of {run}. Set another MASTER_PORT, the same for all ranks of this run."
        )
    return messages.under(run)


def _name(world: World, environ: Mapping[str, str]) -> str:
    """Return what tells this run from others of the same user."""
    size = f"{world.world_size} ranks"
    if "TORCHELASTIC_RUN_ID" in environ:
        return f"torchrun {environ['TORCHELASTIC_RUN_ID']}, {size}"
    if "SLURM_STEP_ID" in environ:
        return f"Slurm step {environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}, {size}"
    return size


def _store(world: World, timeout: timedelta) -> Store:
    """Return the store: torchrun's agent holds it or rank 0, which waits for nobody."""
    if agent_holds_store():
        store: Store = next(iter(rendezvous("env://", timeout=timeout)))[0]
        return store
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        return TCPStore(address, port, world.world_size, world.is_main, timeout, wait_for_workers=False)
    except RuntimeError as error:
        if not address_in_use(error):
            raise
        raise RequestError(
            f"MASTER_PORT={port} is taken on {address} by another process. Set another one, on every node alike."
        ) from None
