"""Whatever ends a rank ends the run: within ten seconds, with the rank and the cause named, and no process left."""

import json
from pathlib import Path
from signal import SIGABRT, SIGINT, SIGKILL, SIGSTOP

import pytest

from helpers.marks import at_night
from helpers.patience import patience
from helpers.processes import (
    COLD,
    COLD_TORCHRUN,
    ENDLESS,
    FAULTY,
    GONE_S,
    ONE_BY_ONE,
    SMALL,
    START_S,
    TORCHRUN,
    TWO,
    kill,
    ran,
    started,
    summary,
    until,
    until_saved,
)

pytestmark = [pytest.mark.spawn, pytest.mark.slow]


@pytest.mark.parametrize("rank", [*at_night(0), 1])
def test_an_exception_on_one_rank_ends_the_run_with_its_traceback_first(rank: int, folder: Path) -> None:
    with started(folder, *FAULTY, "+model.what=raise", f"+model.rank={rank}", TWO) as run:
        trace = folder / "run" / "ranks" / f"rank_{rank}.txt"
        until(trace.exists, START_S, "no trace")
        ended = run.end(GONE_S)
    assert ended.status == 1
    assert ended.err.splitlines()[:2] == [f"Rank {rank} failed:", "Traceback (most recent call last):"]
    assert ended.err.rstrip().endswith("ValueError: the cat sat on the keyboard")
    assert ended.err.count("Traceback") == 1, "what the other rank saw is a consequence"
    assert "own_models.py" in ended.err
    assert "frame #" not in ended.err, "C++ stack frames"
    said = summary(folder / "run")
    assert said["status"] == "failed"
    assert said["error"] == f"rank {rank}: ValueError: the cat sat on the keyboard"
    assert said["global_step"] == 2
    assert "the cat sat on the keyboard" in trace.read_text()
    assert "Traceback" in trace.with_name(f"rank_{1 - rank}.txt").read_text()
    assert "the cat sat on the keyboard" in (folder / "run" / "train.log").read_text()


def test_an_exception_in_the_only_process_is_told_alike(folder: Path) -> None:
    ended = ran(folder, *FAULTY, "+model.what=raise", "+model.rank=0", "launcher.nproc_per_node=1")
    assert ended.status == 1
    assert ended.err.splitlines()[:2] == ["Rank 0 failed:", "Traceback (most recent call last):"]
    assert summary(folder / "run")["error"] == "rank 0: ValueError: the cat sat on the keyboard"
    assert "the cat sat on the keyboard" in (folder / "run" / "ranks" / "rank_0.txt").read_text()


@pytest.mark.parametrize("rank", [0, *at_night(1)])
def test_a_rank_that_cannot_make_its_model_ends_the_run_before_anything_is_written(rank: int, folder: Path) -> None:
    ended = ran(folder, *SMALL, "model._target_=own_models.Unbuildable", f"+model.rank={rank}", TWO)
    assert ended.status == 1
    assert ended.err.splitlines()[:2] == [f"Rank {rank} failed:", "Traceback (most recent call last):"]
    assert ended.err.rstrip().endswith("ValueError: the cat sat on the blueprint")
    assert not (folder / "run").exists()


@pytest.mark.parametrize(
    ("what", "rank", "words"),
    [
        ("segfault", 1, "was killed by SIGSEGV"),
        ("exit", 0, "exited with exit code 0"),
    ],
)
def test_a_rank_that_dies_without_a_word_is_named_with_how_it_died(
    what: str, rank: int, words: str, folder: Path
) -> None:
    ended = ran(folder, *FAULTY, f"+model.what={what}", f"+model.rank={rank}", TWO)
    assert ended.status == 1
    assert ended.err.startswith(f"Rank {rank} (process ")
    assert words in ended.err.splitlines()[0]
    assert "frame #" not in ended.err, "C++ stack frames"
    said = summary(folder / "run")
    assert said["status"] == "failed"
    assert said["error"].startswith(f"Rank {rank} (process ")
    assert words in said["error"]


@pytest.mark.parametrize(
    ("what", "rank", "words"),
    [
        *at_night(
            ("sys.exit", 1, "RuntimeError: sys.exit(0) was called in the run: raise an exception there instead.")
        ),
        ("breakpoint", 0, "breakpoint() needs a terminal, which a rank does not have: run with strategy=single"),
    ],
)
def test_a_rank_that_calls_for_an_exit_or_a_terminal_fails_with_a_word(
    what: str, rank: int, words: str, folder: Path
) -> None:
    ended = ran(folder, *FAULTY, f"+model.what={what}", f"+model.rank={rank}", TWO)
    assert ended.status == 1
    assert f"Rank {rank} failed:" in ended.err
    assert words in ended.err
    assert summary(folder / "run")["status"] == "failed"


@pytest.mark.parametrize(("rank", "method"), [(0, "forkserver"), *at_night((1, "forkserver"), (1, "spawn"))])
def test_a_rank_that_is_killed_in_training_leaves_its_checkpoints_and_no_process(
    rank: int, method: str, folder: Path
) -> None:
    command = COLD if method == "spawn" else None
    with started(folder, *ENDLESS, TWO, f"launcher.start_method={method}", command=command) as run:
        until_saved(run, folder / "run")
        pid = run.rank(rank)
        kill(pid, SIGKILL)
        ended = run.end(GONE_S)
    assert ended.status == 1
    words = f"Rank {rank} (process {pid}) was killed by SIGKILL, without a traceback."
    advice = "If nobody killed it, memory ran out (dmesg shows it): lower data.batch_size or num_workers."
    assert ended.err == f"{words}\n{advice}\n"
    said = summary(folder / "run")
    assert (said["status"], said["error"]) == ("failed", words)
    resumed = ran(folder, *ENDLESS, TWO, "ckpt_path=auto", "trainer.max_time=0")
    assert resumed.status == 0, resumed.err
    assert summary(folder / "run")["status"] == "finished"


def test_no_rank_outlives_the_process_it_was_forked_from(folder: Path) -> None:
    with started(folder, *ENDLESS, TWO, command=COLD) as run:
        until_saved(run, folder / "run")
        kill(server := run.fork_server, SIGKILL)
        ended = run.end(GONE_S)
    assert ended.status == 1
    assert f"The process that ranks are forked from (process {server}) was killed by SIGKILL" in ended.err
    assert summary(folder / "run")["status"] == "failed"


def test_a_stopped_fork_server_delays_no_end(folder: Path) -> None:
    with started(folder, *ENDLESS, TWO, command=COLD) as run:
        until_saved(run, folder / "run")
        kill(run.fork_server, SIGSTOP)
        kill(run.rank(1), SIGKILL)
        ended = run.end(GONE_S)
    assert ended.status == 1
    assert "Rank" in ended.err


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "with a stopped rank"])
def test_no_rank_outlives_its_launcher(stopped: bool, folder: Path) -> None:
    with started(folder, *ENDLESS, TWO, command=COLD) as run:
        until_saved(run, folder / "run")
        if stopped:
            kill(run.rank(1), SIGSTOP)
        assert len(run.pids()) == 4
        run.signal(SIGKILL)
        run.process.wait(patience(GONE_S))
        run.see_all_gone()


@pytest.mark.parametrize("rank", [*at_night(0), 1])
def test_under_torchrun_the_failing_rank_gives_its_traceback_and_the_other_one_names_it(
    rank: int, folder: Path
) -> None:
    overrides = [*FAULTY, "+model.what=raise", f"+model.rank={rank}"]
    with started(folder, *overrides, command=TORCHRUN) as run:
        until((folder / "run" / "ranks" / f"rank_{rank}.txt").exists, START_S, "no trace")
        ended = run.end(GONE_S)
    assert ended.status == 1
    ours = ended.err[: ended.err.index("ChildFailedError")]  # the rest is torchrun's own
    assert f"Rank {rank} failed:\nTraceback" in ours
    assert f"Rank {rank} failed, so rank {1 - rank} stopped: ValueError: the cat sat on the keyboard" in ours
    assert "frame #" not in ours, "C++ stack frames"
    said = summary(folder / "run")
    assert (said["status"], said["error"]) == ("failed", f"rank {rank}: ValueError: the cat sat on the keyboard")


def test_under_torchrun_others_do_not_wait_for_a_rank_0_that_has_left(folder: Path) -> None:
    leave = "+callbacks.leave._target_=own_models.Deserter"
    with started(folder, *SMALL, leave, command=TORCHRUN) as run:
        ended = run.end()
    assert ended.status == 1
    assert "Rank 0 of 2 exited without a report." in ended.err


ABSENT = """
import os
import signal
import sys
import time
from pathlib import Path

_, rank, *sys.argv = sys.argv
if os.environ["RANK"] == rank:
    Path("absent").touch()
    time.sleep(600)
elif rank == "0":  # a signal that comes while torch loads may be lost
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Path("here").touch()
else:
    sys.addaudithook(lambda *event: Path("here").touch() if event[0] == "import" and event[1][0] == "torch" else None)

from ddp_recipes.main import main

main()
"""


@pytest.mark.parametrize("rank", [0, *at_night(1)])
def test_under_torchrun_nobody_waits_for_a_rank_that_a_signal_ended_before_they_met(rank: int, folder: Path) -> None:
    (folder / "absent.py").write_text(ABSENT)
    with started(folder, *SMALL, command=[*COLD_TORCHRUN, "absent.py", str(rank)]) as run:
        for name in ("absent", "here"):
            until((folder / name).exists, START_S, f"not {name}")
        run.signal(SIGINT)
        ended = run.end(GONE_S)
    assert ended.status in (1, -SIGABRT)  # torch's agent at times aborts as it ends: "terminate called without …"


@pytest.mark.nightly
def test_under_torchrun_data_workers_delay_no_end(folder: Path) -> None:
    overrides = [*SMALL[2:], "data=random", *ONE_BY_ONE, "data.num_workers=3", "model._target_=own_models.Faulty"]
    with started(folder, *overrides, "+model.what=raise", "+model.rank=1", command=TORCHRUN) as run:
        until((folder / "run" / "ranks" / "rank_1.txt").exists, START_S, "no trace")
        ended = run.end(GONE_S)
    assert ended.status == 1
    assert "Rank 1 failed:\nTraceback" in ended.err


def test_a_job_that_fails_in_a_sweep_fails_alone(folder: Path) -> None:
    overrides = [*FAULTY[:-2], "model._target_=own_models.Faulty", "+model.what=raise", "+model.rank=1,2"]
    ended = ran(folder, "-m", *overrides, TWO, "hydra.sweep.dir=sweep")
    assert ended.status == 1
    assert "Rank 1 failed:\nTraceback" in ended.err
    said = [json.loads((folder / "sweep" / number / "summary.json").read_text()) for number in "01"]
    assert [one["status"] for one in said] == ["failed", "finished"]
    assert said[0]["error"] == "rank 1: ValueError: the cat sat on the keyboard"
