"""A rank that stops where nobody used to look: beside a log line, and after the last step."""

import time
from contextlib import ExitStack
from pathlib import Path
from signal import SIGSTOP

import pytest

from helpers.patience import patience, timeout_s
from helpers.processes import (
    COLD_TORCHRUN,
    ENDLESS,
    GONE_S,
    SMALL,
    START_S,
    TWO,
    kill,
    started,
    summary,
    until,
    until_saved,
)

pytestmark = [pytest.mark.spawn, pytest.mark.slow]


@pytest.fixture
def limit() -> int:
    """Return ``launcher.timeout_s``."""
    return timeout_s()


@pytest.mark.parametrize(
    ("rank", "command"),
    [
        pytest.param(0, None, id="0-local", marks=pytest.mark.nightly),
        pytest.param(0, COLD_TORCHRUN, id="0-torchrun", marks=pytest.mark.nightly),
        pytest.param(1, None, id="1-local", marks=pytest.mark.nightly),
        pytest.param(1, COLD_TORCHRUN, id="1-torchrun"),
    ],
)
def test_a_rank_that_hangs_after_the_last_step_is_named(
    rank: int, command: list[str] | None, folder: Path, limit: int
) -> None:
    own = [
        f"launcher.timeout_s={limit}",
        "+callbacks.sleeper._target_=own_models.Sleeper",
        f"+callbacks.sleeper.rank={rank}",
    ]
    with started(folder, *SMALL, *own, *([] if command else [TWO]), command=command) as run:
        until((folder / f"ended_{1 - rank}").exists, START_S, "it trains for ever")
        ended = run.end(limit + 5 + GONE_S)
    assert ended.status == 1
    assert f"Rank {rank} of 2 did not come to its end within launcher.timeout_s={limit} seconds" in ended.err
    if rank == 1 or command is None or (folder / "run" / "summary.json").exists():  # rank 0 was killed by another rank
        assert summary(folder / "run")["status"] == "failed"
    assert "own_models.py" in (folder / "run" / "ranks" / f"rank_{rank}.txt").read_text()


@pytest.mark.parametrize(
    "command",
    [pytest.param(None, id="local"), pytest.param(COLD_TORCHRUN, id="torchrun", marks=pytest.mark.nightly)],
)
def test_a_rank_0_that_hangs_while_it_closes_is_named(command: list[str] | None, folder: Path, limit: int) -> None:
    own = [f"launcher.timeout_s={limit}", "logger=none", "logger._target_=own_models.NeverCloses"]
    with started(folder, *SMALL, *own, *([] if command else [TWO]), command=command) as run:
        until(lambda: (folder / "closes").exists() or run.process.poll() is not None, START_S, "it trains for ever")
        ended = run.end(limit + 5 + GONE_S)
    message = "Rank 0 did not respond and was killed."
    if command:
        message = f"Rank 0 of 2 did not come to its end within launcher.timeout_s={limit} seconds of the others"
    assert ended.status == 1
    assert message in ended.err
    done = summary(folder / "run")
    assert done["status"] == "failed"
    assert message in done["error"]
    assert "in close" in (folder / "run" / "ranks" / "rank_0.txt").read_text()


@pytest.mark.nightly
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_stopped_while_the_other_one_logs_is_named(rank: int, folder: Path, limit: int) -> None:
    loud = [*ENDLESS, "model._target_=own_models.Loud", f"launcher.timeout_s={limit}"]
    with started(folder, *loud, TWO) as run:
        until_saved(run, folder / "run")
        kill(run.rank(rank), SIGSTOP)
        ended = run.end(limit + 5 + GONE_S)
    assert ended.status == 1
    assert f"Rank {rank} of 2 did not respond within launcher.timeout_s={limit} seconds" in ended.err


def test_a_rank_0_that_holds_the_store_and_is_stopped_while_the_other_one_logs_is_named(
    folder: Path, limit: int
) -> None:
    """As under srun and mpirun, where rank 0 holds the store."""
    loud = [*ENDLESS, "model._target_=own_models.Loud", f"launcher.timeout_s={limit}"]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29871", "GLOO_SOCKET_IFNAME": "lo"}
    with ExitStack() as stack:
        both = [
            stack.enter_context(started(folder, *loud, environ={**shared, "RANK": rank, "LOCAL_RANK": rank}))
            for rank in ("0", "1")
        ]
        until_saved(both[0], folder / "run")
        both[0].signal(SIGSTOP)
        began = time.monotonic()
        ended = both[1].end(limit + 5 + GONE_S)
        assert time.monotonic() - began < patience(limit + 5 + GONE_S)
    assert ended.status == 1
    assert f"Rank 0 of 2 did not respond within launcher.timeout_s={limit} seconds" in ended.err
