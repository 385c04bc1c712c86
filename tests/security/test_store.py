"""The file that a local run's ranks meet in: what it grows by, and a rank that keeps it from the others."""

import os
from pathlib import Path
from signal import SIGTERM

import pytest

from helpers.marks import slow_but
from helpers.processes import ENDLESS, GONE_S, SMALL, START_S, Run, started, until, until_saved

pytestmark = [pytest.mark.spawn]
T = 3


def meeting(process: int) -> Path:
    """Return the file that a rank's store is in."""
    files = Path(f"/proc/{process}/fd").iterdir()
    return next(file for file in files if os.readlink(file).startswith("/memfd:ddp_recipes"))


def size(run: Run) -> int:
    return meeting(run.rank(1)).stat().st_size


STOPS = {
    "while made": ["model._target_=own_models.StopsWhileMade"],
    "while joining": ["strategy._target_=own_models.StopsWhileJoining"],
    "while training": ["+callbacks.stops._target_=own_models.StopsWhileTraining"],
}


@pytest.mark.slow
@pytest.mark.parametrize("when", slow_but([], STOPS, daily=["while joining"]))
def test_a_rank_that_is_stopped_with_the_store_is_named(when: str, folder: Path) -> None:
    """It is stopped as it writes a message: the others cannot read or write any."""
    with started(folder, *SMALL, *STOPS[when], "launcher.nproc_per_node=3", f"launcher.timeout_s={T}") as run:
        until(lambda: (folder / "stopped").exists() or run.process.poll() is not None, START_S, "nothing is stopped")
        ended = run.end(T + 5 + GONE_S)
    assert ended.status == 1
    assert "Rank 1 of 3 did not" in ended.err


@pytest.mark.slow
def test_workers_that_take_the_next_free_shard_leave_nothing_in_the_store(folder: Path) -> None:
    servers = ["strategy=parameter_server", "strategy.staleness=2", "launcher.nproc_per_node=3"]
    with started(folder, *ENDLESS, *servers) as run:
        until_saved(run, folder / "run")
        before, last = size(run), folder / "run" / "checkpoints" / "last.pt"
        saved = last.stat().st_mtime_ns
        until(lambda: last.stat().st_mtime_ns > saved, START_S, "it trains no more")
        assert size(run) == before
        run.signal(SIGTERM)
        assert run.end().status == 75
