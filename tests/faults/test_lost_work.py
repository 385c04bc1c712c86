"""Nothing is lost, mixed up or left untrue when runs are started again, ended, or started side by side."""

import re
from contextlib import ExitStack
from pathlib import Path
from signal import SIGKILL, SIGTERM

import pytest

from ddp_recipes.checkpointing.files import newest_first
from ddp_recipes.checkpointing.reading import load_first
from helpers.checkpoints import BROKEN, broken_disk
from helpers.processes import (
    ENDLESS,
    FAULTY,
    SMALL,
    START_S,
    TORCHRUN,
    Run,
    free_port,
    kill,
    ran,
    started,
    summary,
    until,
    until_saved,
)

pytestmark = [pytest.mark.spawn, pytest.mark.slow]


def by_the_clock(overrides: list[str]) -> list[str]:
    """Return the overrides without the run directory, whose name then follows the clock."""
    return [override for override in overrides if not override.startswith("hydra.")]


STEPS = 120
# Takes seconds, so that there is time to hurt it, and leaves a checkpoint every few steps.
LONG = [
    *by_the_clock(ENDLESS),
    f"trainer.max_steps={STEPS}",
    "trainer.num_sanity_val_steps=0",
    "+model.sleep_s=0.02",
    "data.global_batch_size=40",
    "logger=none",
]


def directory_of(folder: Path, seed: int) -> Path:
    """Return the one directory of the run with this seed."""
    found = [path.parent for path in folder.glob("outputs/*/*/config.yaml") if f"seed: {seed}\n" in path.read_text()]
    assert len(found) == 1, found
    return found[0]


def until_steps(run: Run, folder: Path, seed: int) -> None:
    """Wait until the first checkpoint of the run with this seed is there."""

    def saved() -> bool:
        configs = folder.glob("outputs/*/*/config.yaml")
        return any(
            (path.parent / "checkpoints" / "last.pt").exists()
            for path in configs
            if f"seed: {seed}\n" in path.read_text()
        )

    until(saved, START_S, "no checkpoint")


def first_steps(run: Run) -> list[int]:
    """Return the step that each start of a run began at, as it printed them."""
    printed = (run.folder / f"{run.mark}.out").read_text()
    return [int(number) for number in re.findall(r"steps +\d+, from (\d+)", printed)]


@pytest.mark.nightly
def test_two_torchruns_in_one_folder_each_go_on_in_their_own_directory(folder: Path) -> None:
    with ExitStack() as stack:
        runs = {}
        for seed in (1, 2):
            command = [*TORCHRUN[:2], "--master-addr=127.0.0.1", f"--master-port={free_port()}", "--max-restarts=1"]
            runs[seed] = stack.enter_context(started(folder, *LONG, f"seed={seed}", command=command))
        for seed, run in runs.items():
            until_steps(run, folder, seed)
            kill(run.rank(1), SIGKILL)
        for seed, run in runs.items():
            ended = run.end()
            assert ended.status == 0, ended.err
            assert len(first_steps(run)) == 2
            assert first_steps(run)[1] >= 5
            said = summary(directory_of(folder, seed))
            assert (said["status"], said["global_step"], said["overrides"][-1]) == ("finished", STEPS, f"seed={seed}")
    assert len(list(folder.glob("outputs/*/*"))) == 2


def test_runs_that_start_at_once_get_a_directory_each(folder: Path) -> None:
    short = [
        *by_the_clock(SMALL),
        "trainer.max_epochs=1",
        "logger=none",
        "hydra.run.dir=outputs/${now:%Y}",
    ]  # all in one second
    with ExitStack() as stack:
        runs = [
            stack.enter_context(started(folder, *short, own, command=command))
            for command in (None, [*TORCHRUN[:1], "--standalone", "--nproc-per-node=1"])
            for own in ("strategy=single", "seed=7")
        ]
        assert [run.end().status for run in runs] == [0, 0, 0, 0]
    directories = sorted((folder / "outputs").iterdir())
    assert [path.name.removeprefix(directories[0].name) for path in directories] == ["", "_1", "_2", "_3"]
    assert [summary(path)["status"] for path in directories] == ["finished"] * 4


def test_a_rank_that_gets_sigterm_under_torchrun_goes_on_in_its_directory(folder: Path) -> None:
    with started(folder, *LONG, "seed=1", command=[*TORCHRUN, "--max-restarts=1"]) as run:
        until_steps(run, folder, 1)
        kill(run.rank(1), SIGTERM)
        ended = run.end()
    assert ended.status == 0, ended.err
    assert first_steps(run)[1] >= 5
    assert summary(directory_of(folder, 1))["global_step"] == STEPS
    assert not list(folder.glob(".torchrun*"))


@pytest.mark.nightly
def test_a_start_that_was_refused_does_not_go_on_in_the_directory_of_another_run(folder: Path) -> None:
    directory = folder / "run"
    assert ran(folder, *SMALL, "logger=none", "launcher.nproc_per_node=1").status == 0
    before = {path: path.stat().st_mtime_ns for path in directory.rglob("*")}
    ended = ran(folder, *SMALL, "seed=7", "logger=none", command=[*TORCHRUN, "--max-restarts=1"])
    assert ended.status == 1
    assert ended.err.count("already holds a run") == 2  # it does not become its own by a restart
    assert {path: path.stat().st_mtime_ns for path in directory.rglob("*")} == before


def test_a_second_start_that_cannot_know_where_the_first_one_was_is_refused(folder: Path) -> None:
    short = [*by_the_clock(FAULTY), "+model.what=raise", "+model.rank=0", "logger=none"]
    ended = ran(folder, *short, command=[*TORCHRUN, "--max-restarts=1", "--log-dir=/dev/null"])
    assert ended.status == 1
    assert "torchrun starts this run again (restart 1), and where it began is not known" in ended.err
    assert len(list(folder.glob("outputs/*/*"))) == 1


@pytest.mark.nightly
def test_a_summary_is_true_of_a_resumed_run_that_was_killed_whoever_is_left(folder: Path) -> None:
    directory, resumed = folder / "run", [*LONG, "hydra.run.dir=run", "ckpt_path=auto", "trainer.max_steps=100000"]
    first = ran(folder, *resumed, "trainer.max_steps=10", "launcher.nproc_per_node=1")
    assert (first.status, summary(directory)["status"]) == (0, "finished")
    with started(folder, *resumed, "launcher.nproc_per_node=1") as run:
        until((directory / "checkpoints" / "step_00000020.pt").exists, START_S, "no new checkpoint")
        run.signal(SIGKILL)  # nobody is left
        run.process.wait()
    assert (summary(directory)["status"], summary(directory)["world_size"]) == ("running", 1)
    with started(folder, *resumed, "checkpoint.save_top_k=-1", command=TORCHRUN) as run:
        until(lambda: summary(directory)["world_size"] == 2, START_S, "it does not begin")
        kill(run.rank(0), SIGKILL)
        assert run.end().status == 1
    assert summary(directory)["status"] == "failed"
    assert summary(directory)["error"] == "Rank 0 of 2 exited without a report."


@pytest.mark.parametrize(
    ("what", "processes", "logger"), [("full", 1, "tensorboard"), *((w, 2, "none") for w in BROKEN)]
)
def test_a_disk_that_takes_no_more_ends_a_run_with_the_promised_message(
    what: str, processes: int, logger: str, folder: Path
) -> None:
    ranks, directory = f"launcher.nproc_per_node={processes}", folder / "disk" / "run"
    own = [ranks, f"logger={logger}", "hydra.run.dir=disk/run", "model.hidden_features=1000"]
    with broken_disk(folder / "disk", what) as fail, started(folder, *ENDLESS, *own) as run:
        until_saved(run, directory)
        fail()
        ended = run.end()
        kept = load_first(newest_first(directory / "checkpoints"))
        left = summary(directory)["status"]
    assert ended.status == 1
    assert left == ("running" if what == "read-only" else "failed")
    file = r"(step_\d+\.pt|events\.out\S*)" if logger == "tensorboard" else r"step_\d+\.pt"
    assert re.search(rf"{file} could not be written: {BROKEN[what]}\. ", ended.err.splitlines()[-1]), ended.err
    if logger == "none":  # TensorBoard's thread prints one of its own
        assert "Traceback" not in ended.err
    assert kept[2] == []  # the newest one is whole


@pytest.mark.nightly
def test_a_full_disk_of_mlflows_database_alone_ends_a_run_with_that_message(folder: Path) -> None:
    pytest.importorskip("mlflow", reason="it is not installed")
    own = [
        "launcher.nproc_per_node=2",
        "logger=mlflow",
        "logger.tracking_uri=sqlite:///disk/own.db",
        "logger.flush_secs=0.01",
    ]
    with broken_disk(folder / "disk", "full") as fail, started(folder, *ENDLESS, *own) as run:
        until_saved(run, folder / "run")
        fail()
        ended = run.end()
    assert ended.status == 1
    assert re.search(
        r"^disk/own\.db could not be written: No space left on device\. Free on that disk: \d", ended.err, re.M
    )
    assert "own.db could not be written" in summary(folder / "run")["error"]


REMOVING = """
import os
import shutil

from ddp_recipes import Callback


class Removing(Callback):
    def on_step(self, step):
        if step == 2 and os.environ["RANK"] == "0":
            shutil.rmtree("run")
"""


def test_a_run_directory_that_is_removed_while_the_run_goes_on_is_named(folder: Path) -> None:
    (folder / "removing.py").write_text(REMOVING)
    own = [
        "+callbacks.removing._target_=removing.Removing",
        "logger=csv",
        "trainer.log_every_n_steps=1",
        "checkpoint=none",
    ]
    ended = ran(folder, *SMALL, *own, "launcher.nproc_per_node=2")
    assert ended.status == 1
    assert "the run directory has been removed, or moved, while the run went on." in ended.err
    assert "Traceback" not in ended.err
