"""A rank that no longer responds, stopped or dead, is named in time, and others do not wait for it."""

import json
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from signal import SIGSTOP

import pytest

from helpers.patience import timeout_s
from helpers.processes import (
    COLD_TORCHRUN,
    ENDLESS,
    FAULTY,
    GONE_S,
    ONE_BY_ONE,
    SMALL,
    START_S,
    TORCHRUN,
    TWO,
    Ended,
    Run,
    kill,
    started,
    summary,
    until,
    until_saved,
)

pytestmark = [pytest.mark.spawn, pytest.mark.slow]


@contextmanager
def a_run_for_each_rank(folder: Path, *overrides: str, command: list[str] | None = None) -> Iterator[list[Run]]:
    """Start two runs of two ranks side by side, since they mostly wait; ``{rank}`` in overrides is 0 and 1."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(started(folder, *(each.format(rank=rank) for each in overrides), command=command))
            for rank in (0, 1)
        ]


def is_there(run: Run, rank: int) -> bool:
    return str(rank) in run.pids().values()


def ends(runs: list[Run], begun: list[float], seconds: float) -> list[Ended]:
    """Return how the runs ended, each so many seconds after something began."""
    return [run.end(max(0.1, at + seconds - time.monotonic())) for run, at in zip(runs, begun, strict=True)]


@pytest.mark.parametrize(
    "command", [pytest.param(None, id="local"), pytest.param(COLD_TORCHRUN, id="torchrun", marks=pytest.mark.nightly)]
)
def test_a_stopped_rank_is_named_and_leaves_its_stack(command: list[str] | None, folder: Path) -> None:
    limit = timeout_s()
    own = [f"launcher.timeout_s={limit}", "hydra.run.dir=run_{rank}", *([] if command else [TWO])]
    with a_run_for_each_rank(folder, *ENDLESS, *own, command=command) as runs:
        begun = []
        for rank, run in enumerate(runs):
            until_saved(run, folder / f"run_{rank}")
            kill(run.rank(rank), SIGSTOP)
            begun.append(time.monotonic())
        both = ends(runs, begun, limit + GONE_S)
    for rank, ended in enumerate(both):
        assert ended.status == 1
        assert f"Rank {rank} of 2 did not respond within launcher.timeout_s={limit} seconds" in ended.err
        if command is None:
            assert f"Rank {rank} of 2 did not respond" in summary(folder / f"run_{rank}")["error"]
        # Every rank's Python stack is there: where the one waited, and where the other one was stopped.
        for number in (0, 1):
            assert "loop.py" in (folder / f"run_{rank}" / "ranks" / f"rank_{number}.txt").read_text()
        if command is None:  # the last collectives of the rank that waited
            recorded = (folder / f"run_{rank}" / "ranks" / f"flight_recorder_{1 - rank}.json").read_text()
            assert "all_reduce" in {
                each["profiling_name"].partition(":")[2] for each in json.loads(recorded)["entries"]
            }


def test_a_data_worker_that_hangs_is_named_where_there_is_one_rank(folder: Path) -> None:
    limit = timeout_s()
    overrides = [*ENDLESS, *ONE_BY_ONE, "strategy=single", "data.num_workers=2", f"launcher.timeout_s={limit}"]
    with started(folder, *overrides) as run:
        until_saved(run, folder / "run")
        worker = min(pid for pid in run.pids() if pid != run.pid)
        kill(worker, SIGSTOP)
        ended = run.end(limit + GONE_S)
    assert ended.status == 1
    assert re.search(rf"Data worker \d \(process {worker}\) of data.train gave no batch within", ended.err)
    assert "did not respond" not in ended.err
    assert summary(folder / "run")["status"] == "failed"


def test_a_rank_that_is_stopped_while_it_starts_is_named(folder: Path) -> None:
    limit = timeout_s()
    own = [TWO, f"launcher.timeout_s={limit}", "hydra.run.dir=run_{rank}"]
    with a_run_for_each_rank(folder, *ENDLESS, *own) as runs:
        begun = []
        for rank, run in enumerate(runs):
            until(partial(is_there, run, rank), START_S, "the rank is not there")
            kill(run.rank(rank), SIGSTOP)
            begun.append(time.monotonic())
        both = ends(runs, begun, limit + GONE_S)
    for rank, ended in enumerate(both):
        assert ended.status == 1
        assert f"Rank {rank} of 2 did not" in ended.err


@pytest.mark.nightly
def test_under_torchrun_a_rank_that_is_stopped_while_it_starts_is_named_and_ended(folder: Path) -> None:
    limit = timeout_s()
    with started(folder, *ENDLESS, f"launcher.timeout_s={limit}", command=TORCHRUN) as run:
        until(lambda: "1" in run.pids().values(), START_S, "the rank is not there")
        kill(run.rank(1), SIGSTOP)
        words = f"Rank 1 of 2 did not arrive within launcher.timeout_s={limit} seconds"
        until(lambda: words in (folder / f"{run.mark}.err").read_text(), START_S, "nobody misses it")
        ended = run.end(GONE_S)  # the agent would give the stopped rank half a minute
    assert ended.status == 1
    assert not (folder / "run").exists()


def test_under_torchrun_a_rank_that_exits_without_a_report_is_named(folder: Path) -> None:
    own = ["+model.what=exit", "+model.rank={rank}", "hydra.run.dir=run_{rank}"]
    with a_run_for_each_rank(folder, *FAULTY, *own, command=TORCHRUN) as runs:
        begun = []
        for rank in (0, 1):
            until((folder / f"run_{rank}" / "ranks" / f"rank_{1 - rank}.txt").exists, START_S, "no trace")
            begun.append(time.monotonic())
        both = ends(runs, begun, GONE_S)
    for rank, ended in enumerate(both):
        assert ended.status == 1
        assert f"Rank {rank} of 2 exited without a report." in ended.err


@pytest.mark.nightly
def test_under_torchrun_a_rank_that_ends_while_it_gets_ready_is_not_waited_for(folder: Path) -> None:
    with started(folder, *SMALL, "model._target_=own_models.Deserted", "+model.rank=1", command=TORCHRUN) as run:
        until(lambda: "1" in run.pids().values(), START_S, "the rank is not there")
        until(lambda: "1" not in run.pids().values(), START_S, "the rank stays")
        ended = run.end(GONE_S)
    assert ended.status == 1
    assert "\nRank 1 of 2 exited without a report.\n" in f"\n{ended.err}"
    assert "did not arrive" not in ended.err
    assert not (folder / "run").exists()
