"""A rank that no longer responds, stopped or dead, is named in time, and others do not wait for it."""

from pathlib import Path
from signal import SIGSTOP

import pytest

from helpers.processes import (
    ENDLESS,
    FAULTY,
    GONE_S,
    SMALL,
    START_S,
    TORCHRUN,
    TWO,
    kill,
    started,
    summary,
    until,
    until_saved,
)

pytestmark = [pytest.mark.spawn, pytest.mark.slow, pytest.mark.alone]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_is_named_once_the_collective_timeout_is_over(rank: int, folder: Path) -> None:
    with started(folder, *ENDLESS, TWO, "launcher.timeout_s=3") as run:
        until_saved(run, folder / "run")
        kill(run.rank(rank), SIGSTOP)
        ended = run.end(3 + GONE_S)
    assert ended.status == 1
    assert f"Rank {rank} of 2 did not respond within launcher.timeout_s=3 seconds" in ended.err
    assert f"Rank {rank} of 2 did not respond" in summary(folder / "run")["error"]
    # Every rank's Python stack is there: where the one waited, and where the other one was stopped.
    for number in (0, 1):
        assert "loop.py" in (folder / "run" / "ranks" / f"rank_{number}.txt").read_text()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_stopped_while_it_starts_is_named(rank: int, folder: Path) -> None:
    with started(folder, *ENDLESS, TWO, "launcher.timeout_s=3") as run:
        until(lambda: str(rank) in run.pids().values(), START_S, "the rank is not there")
        kill(run.rank(rank), SIGSTOP)
        ended = run.end(3 + GONE_S)
    assert ended.status == 1
    assert f"Rank {rank} of 2 did not" in ended.err


def test_under_torchrun_a_rank_that_is_stopped_while_it_starts_is_named_and_ended(folder: Path) -> None:
    with started(folder, *ENDLESS, "launcher.timeout_s=3", command=TORCHRUN) as run:
        until(lambda: "1" in run.pids().values(), START_S, "the rank is not there")
        kill(run.rank(1), SIGSTOP)
        words = "Rank 1 of 2 did not arrive within launcher.timeout_s=3 seconds"
        until(lambda: words in (folder / f"{run.mark}.err").read_text(), START_S, "nobody misses it")
        ended = run.end(GONE_S)  # the agent would give the stopped rank half a minute
    assert ended.status == 1
    assert not (folder / "run").exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_under_torchrun_a_stopped_rank_is_named_and_ended_and_leaves_its_stack(rank: int, folder: Path) -> None:
    with started(folder, *ENDLESS, "launcher.timeout_s=3", command=TORCHRUN) as run:
        until_saved(run, folder / "run")
        kill(run.rank(rank), SIGSTOP)
        ended = run.end(3 + GONE_S)
    assert ended.status == 1
    assert f"Rank {rank} of 2 did not respond within launcher.timeout_s=3 seconds" in ended.err
    for number in (0, 1):
        assert "loop.py" in (folder / "run" / "ranks" / f"rank_{number}.txt").read_text()


@pytest.mark.parametrize("rank", [0, 1])
def test_under_torchrun_a_rank_that_ends_without_a_word_is_named(rank: int, folder: Path) -> None:
    overrides = [*FAULTY, "+model.what=exit", f"+model.rank={rank}"]
    with started(folder, *overrides, command=TORCHRUN) as run:
        until((folder / "run" / "ranks" / f"rank_{1 - rank}.txt").exists, START_S, "no trace")
        ended = run.end(GONE_S)
    assert ended.status == 1
    assert f"Rank {rank} of 2 exited without a report." in ended.err


def test_under_torchrun_a_rank_that_ends_while_it_gets_ready_is_not_waited_for(folder: Path) -> None:
    with started(folder, *SMALL, "model._target_=own_models.Deserted", "+model.rank=1", command=TORCHRUN) as run:
        until(lambda: "1" in run.pids().values(), START_S, "the rank is not there")
        until(lambda: "1" not in run.pids().values(), START_S, "the rank stays")
        ended = run.end(GONE_S)
    assert ended.status == 1
    assert "\nRank 1 of 2 exited without a report.\n" in f"\n{ended.err}"
    assert "did not arrive" not in ended.err
    assert not (folder / "run").exists()
