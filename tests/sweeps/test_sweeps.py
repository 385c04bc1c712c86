"""Every job of a sweep is a run of its own, and the sweep says what came of each."""

import csv
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ddp_recipes.reporting.run_directory import Summary
from helpers.marks import quick_each
from helpers.patience import patience
from helpers.plugins import plugin

pytestmark = pytest.mark.spawn

TINY = [
    "data=random",
    "data.num_samples=64",
    "data.val_samples=16",
    "trainer.max_epochs=1",
    "trainer.progress=false",
    "logger=none",
    "launcher.device=cpu",
]
ALONE = [*TINY, "launcher.nproc_per_node=1"]

# Notes when a run begins and ends, and can be told to fail by a value of the sweep.
MODEL = """
import os
import time

import torch


class Noted(torch.nn.Linear):
    def __init__(self, notes: str, fail_at: float = -1.0, lr: float = 0.0, **features: object) -> None:
        super().__init__(10, 5)
        if lr == fail_at:
            raise RuntimeError("this job was told to fail")
        with open(notes, "a") as file:
            file.write(f"begin {time.monotonic()} {lr} {os.environ.get('OMP_NUM_THREADS')}\\n")
        self.notes = notes

    def __del__(self) -> None:
        with open(self.notes, "a") as file:
            file.write(f"end {time.monotonic()}\\n")
"""


@pytest.fixture
def sweep(tmp_path: Path, python: str) -> Callable[..., str]:
    """Run a sweep into ``tmp_path/sweep`` and return what it printed: ``sweep(*overrides, status=0)``."""

    def run(*overrides: str, status: int = 0) -> str:
        command = [python, "-m", "ddp_recipes", "-m", f"hydra.sweep.dir={tmp_path / 'sweep'}", *overrides]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=patience(240))
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


def noted(folder: Path, *more: str) -> list[str]:
    """Return overrides for the model above; it is written into ``folder``."""
    (folder / "noted.py").write_text(MODEL)
    notes = folder / "notes.txt"
    return ["model._target_=noted.Noted", f"+model.notes={notes}", "+model.lr=${optimizer.lr}", *more]


def summary(folder: Path, job: int) -> Summary:
    values: Summary = json.loads((folder / "sweep" / str(job) / "summary.json").read_text())
    return values


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "sweep" / "sweep.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_a_sweep_ends_with_a_table_of_its_jobs_also_as_csv(tmp_path: Path, sweep: Callable[..., str]) -> None:
    printed = sweep(*ALONE, "model=toy", "optimizer.lr=0.1,0.01")
    rows = table(tmp_path)
    assert [row["status"] for row in rows] == ["finished", "finished"]
    assert ["optimizer.lr=0.1" in row["overrides"] for row in rows] == [True, False]
    for job, row in enumerate(rows):
        assert float(row["objective"]) == summary(tmp_path, job)["metrics"]["val/loss"]
        assert float(row["seconds"]) > 0
        assert f"objective {float(row['objective']):.6g}" in printed


@pytest.mark.slow
def test_a_failed_job_is_named_with_its_reason_and_the_others_finish(tmp_path: Path, sweep: Callable[..., str]) -> None:
    overrides = noted(tmp_path, "+model.fail_at=0.2", "optimizer.lr=0.1,0.2,0.3")
    printed = sweep(*ALONE, *overrides, "hydra.sweep.subdir=rates/${hydra.job.num}", status=1)
    assert [row["status"] for row in table(tmp_path)] == ["finished", "failed", "finished"]
    assert [row["directory"] for row in table(tmp_path)] == ["rates/0", "rates/1", "rates/2"]
    assert "this job was told to fail" in table(tmp_path)[1]["error"]
    assert printed.count("RuntimeError: this job was told to fail") >= 1


@pytest.mark.slow
def test_a_full_disk_keeps_the_end_of_a_sweep_from_nobody(tmp_path: Path, sweep: Callable[..., str]) -> None:
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "sweep.csv").symlink_to("/dev/full")
    overrides = noted(tmp_path, "+model.fail_at=0.2", "optimizer.lr=0.1,0.2")
    printed = sweep(*ALONE, *overrides, status=1)
    assert "sweep.csv was not written: No space left on device." in printed
    assert "Some jobs of the sweep failed; the table above says which." in printed


@pytest.mark.slow
def test_on_failure_stop_starts_no_further_job(tmp_path: Path, sweep: Callable[..., str]) -> None:
    overrides = noted(tmp_path, "+model.fail_at=0.2", "optimizer.lr=0.1,0.2,0.3", "sweep.on_failure=stop")
    sweep(*ALONE, *overrides, status=1)
    assert [row["status"] for row in table(tmp_path)] == ["finished", "failed"]


@pytest.mark.slow
def test_a_job_that_is_refused_beside_one_that_ran_is_a_failure(tmp_path: Path, sweep: Callable[..., str]) -> None:
    """Exit status 2 says that nothing was written."""
    printed = sweep(*ALONE, "model=toy", "trainer.max_steps=1", "data.batch_size=20,0", status=1)
    assert "data.batch_size=0 is not allowed" in printed
    assert [row["status"] for row in table(tmp_path)] == ["finished", "failed"]


@pytest.mark.slow
def test_a_sweep_called_again_runs_only_what_did_not_finish(tmp_path: Path, sweep: Callable[..., str]) -> None:
    first = noted(tmp_path, "+model.fail_at=0.2", "optimizer.lr=0.1,0.2")
    sweep(*ALONE, *first, status=1)
    before = summary(tmp_path, 0)
    (tmp_path / "noted.py").write_text(MODEL.replace("if lr == fail_at", "if False"))
    sweep(*ALONE, *first, "ckpt_path=auto")  # as a run that was stopped says
    sweep(*ALONE, *first)
    assert [row["status"] for row in table(tmp_path)] == ["finished", "finished"]
    assert summary(tmp_path, 0) == before
    begun = [line.split()[2] for line in (tmp_path / "notes.txt").read_text().splitlines() if line.startswith("begin")]
    assert begun == ["0.1", "0.2"]


@pytest.mark.slow
def test_another_sweep_in_the_same_folder_is_refused_and_the_first_is_kept(
    tmp_path: Path, sweep: Callable[..., str]
) -> None:
    sweep(*ALONE, "model=toy", "optimizer.lr=0.1,0.2")
    before = summary(tmp_path, 0)
    printed = sweep(*ALONE, "model=toy", "optimizer.lr=0.3,0.4", status=2)
    assert "holds a job of another sweep" in printed
    assert summary(tmp_path, 0) == before


@pytest.mark.slow
def test_a_value_of_a_sweep_may_list_several_loggers(tmp_path: Path, sweep: Callable[..., str]) -> None:
    alone = [one for one in ALONE if one != "logger=none"]
    sweep(*alone, "model=linear", "logger=csv,[tensorboard,csv]")
    folders = [{each.name for each in (tmp_path / "sweep" / job).iterdir()} for job in ("0", "1")]
    assert [folder & {"csv", "tensorboard"} for folder in folders] == [{"csv"}, {"csv", "tensorboard"}]


@pytest.mark.parametrize("kind", quick_each(2, [["-m", "optimizer.lr=0.1,0.2"], []]), ids=["sweep", "run"])
def test_a_wrong_key_of_sweep_is_refused_before_anything_starts(kind: list[str], tmp_path: Path, python: str) -> None:
    for wrong, message in (("sweep.on_failure=stopp", "Did you mean 'stop'?"), ("+sweep.on_fail=stop", "is not a key")):
        command = [python, "-m", "ddp_recipes", *kind, *ALONE, wrong]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=patience(60))
        assert (done.returncode, done.stdout) == (2, "")
        assert message in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_joblib_runs_whole_multi_process_jobs_side_by_side(tmp_path: Path, sweep: Callable[..., str]) -> None:
    joblib = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    with plugin("hydra_joblib_launcher", tmp_path, *joblib, "+x=1,2"):
        sweep(*TINY, *joblib, "model=toy", "optimizer.lr=0.1,0.01", "launcher.nproc_per_node=2")
    assert [row["status"] for row in table(tmp_path)] == ["finished", "finished"]
    assert [summary(tmp_path, job)["world_size"] for job in (0, 1)] == [2, 2]


@pytest.mark.slow
def test_optuna_gets_rank_0s_objective(tmp_path: Path, sweep: Callable[..., str]) -> None:
    optuna = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=2", "hydra.sweeper.n_jobs=1"]
    with plugin("hydra_optuna_sweeper", tmp_path, *optuna, "+x=interval(0,1)"):
        sweep(*TINY, *optuna, "model=toy", "optimizer.lr=interval(0.001,0.1)", "launcher.nproc_per_node=2")
    best = (tmp_path / "sweep" / "optimization_results.yaml").read_text()
    objectives = [float(row["objective"]) for row in table(tmp_path)]
    assert f"best_value: {min(objectives)}" in best


@pytest.mark.slow
def test_optuna_follows_the_direction_of_the_metric(tmp_path: Path, sweep: Callable[..., str]) -> None:
    optuna = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=2", "hydra.sweeper.n_jobs=1"]
    with plugin("hydra_optuna_sweeper", tmp_path, *optuna, "+x=interval(0,1)"):
        digits = [*ALONE[3:], *optuna, "data=digits", "model=linear", "checkpoint.monitor=val/accuracy"]
        printed = sweep(*digits, "optimizer.lr=interval(0.00001,0.1)")
    assert "hydra.sweeper.direction=maximize, for checkpoint.monitor=val/accuracy is better that way." in printed
    best = (tmp_path / "sweep" / "optimization_results.yaml").read_text()
    assert f"best_value: {max(float(row['objective']) for row in table(tmp_path))}" in best


@pytest.mark.slow
def test_an_optuna_sweep_called_again_runs_only_what_did_not_finish(tmp_path: Path, sweep: Callable[..., str]) -> None:
    optuna = [*ALONE, "hydra/sweeper=optuna", "hydra.sweeper.n_jobs=1", "model=toy"]
    with plugin("hydra_optuna_sweeper", tmp_path, *optuna, "+x=interval(0,1)"):
        sweep(*optuna, "optimizer.lr=interval(0.001,0.1)", "hydra.sweeper.n_trials=1")
    again = sweep(*optuna, "optimizer.lr=interval(0.001,0.1)", "hydra.sweeper.n_trials=2")
    assert again.count("finished before") == 1
    assert [row["status"] for row in table(tmp_path)] == ["finished", "finished"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "message", "status"),
    [
        (["trainer.max_steps=1"], "Job 0 ended without a value of checkpoint.monitor=val/loss, which the", 1),
        (["hydra.sweeper.direction=[minimize,maximize]"], "is for 2 values, and a job returns one", 2),
        (["model._target_=noted.None"], "Then the sweeper ended with ValueError: No trials are completed yet.", 1),
    ],
    ids=["nothing measured", "two directions", "all jobs failed"],
)
def test_optuna_without_a_value_is_told_why(
    asked: list[str], message: str, status: int, tmp_path: Path, sweep: Callable[..., str]
) -> None:
    optuna = [*ALONE, "hydra/sweeper=optuna", "hydra.sweeper.n_trials=2", "hydra.sweeper.n_jobs=1", "model=toy"]
    with plugin("hydra_optuna_sweeper", tmp_path, *optuna, "+x=interval(0,1)"):
        printed = sweep(*optuna, "hydra.sweeper.max_failure_rate=1", "optimizer.lr=choice(1,2)", *asked, status=status)
    assert message in printed
    assert "Traceback" not in printed
    assert printed.count("job 1:") == (asked == ["model._target_=noted.None"])


@pytest.mark.slow
@pytest.mark.parametrize("slots", [1, 2])
def test_devices_runs_as_many_jobs_at_once_as_there_are_slots(
    tmp_path: Path, sweep: Callable[..., str], slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    overrides = noted(tmp_path, "optimizer.lr=0.1,0.2")
    sweep(*ALONE, *overrides, "hydra/launcher=devices", f"hydra.launcher.slots={slots}")
    assert [row["status"] for row in table(tmp_path)] == ["finished", "finished"]
    lines = sorted((tmp_path / "notes.txt").read_text().splitlines(), key=_time)
    kinds = [line.split()[0] for line in lines]
    threads = str(max(1, len(os.sched_getaffinity(0)) // slots))
    assert {line.split()[3] for line in lines if line.startswith("begin")} == {threads}
    at_once = max(kinds[:n].count("begin") - kinds[:n].count("end") for n in range(1, len(kinds) + 1))
    assert at_once <= slots


def test_devices_refuses_a_job_that_never_fits(tmp_path: Path, sweep: Callable[..., str]) -> None:
    wide = ["hydra/launcher=devices", "hydra.launcher.slots=1", "launcher.nproc_per_node=2", "model=toy,toy_mp"]
    assert "needs 2 devices, and 1 are available." in sweep(*TINY, *wide, status=2)


SCRIPT = """
import sys

import ddp_recipes

ddp_recipes.run(sys.argv[1:])
"""


@pytest.mark.slow
def test_devices_runs_the_jobs_of_a_script_that_is_not_run_again(tmp_path: Path, python: str) -> None:
    """Without ``if __name__ == "__main__"``."""
    (tmp_path / "script.py").write_text(SCRIPT)
    own = ["hydra.sweep.dir=sweep", "hydra/launcher=devices", "model=toy", "optimizer.lr=0.1,0.2"]
    command = [python, "script.py", "-m", *ALONE, *own]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=patience(120), check=False)
    assert ended.returncode == 0, ended.stderr
    assert [row["status"] for row in table(tmp_path)] == ["finished", "finished"]


KILLED = """
import os

import torch


class Killed(torch.nn.Linear):
    def __init__(self, at, lr, **features):
        super().__init__(10, 5)
        if lr == at:
            os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("on_failure", "others"), [("continue", ["finished"]), ("stop", [])])
def test_devices_goes_on_beside_a_job_that_is_killed(
    on_failure: str, others: list[str], tmp_path: Path, sweep: Callable[..., str]
) -> None:
    (tmp_path / "killed.py").write_text(KILLED)
    model = ["model._target_=killed.Killed", "+model.at=0.1", "+model.lr=${optimizer.lr}", "optimizer.lr=0.1,0.2"]
    where = ["hydra/launcher=devices", "hydra.launcher.slots=1"]
    printed = sweep(*ALONE, *model, *where, f"sweep.on_failure={on_failure}", status=1)
    assert "was killed by SIGKILL" in table(tmp_path)[0]["error"]
    assert [row["status"] for row in table(tmp_path)] == ["failed", *others]
    assert "memory ran out" in printed
    assert "Traceback" not in printed


DRIVER = """
int cuInit(unsigned flags) { return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
"""
SEEN = """
import os

from ddp_recipes import Callback


class Seen(Callback):
    def __init__(self, notes):
        with open(notes, "a") as file:
            file.write(os.environ["CUDA_VISIBLE_DEVICES"] + "\\n")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("named", "slots"),
    [
        pytest.param("MIG-a, MIG-b", {"MIG-a", "MIG-b"}, id="parts of a GPU"),
        pytest.param(
            *("GPU-a,GPU-beyond-the-driver's-count", {"GPU-a"}), id="a GPU by its UUID", marks=pytest.mark.nightly
        ),
    ],
)
def test_devices_gives_each_job_its_own_entry_of_the_visible_ones(named: str, slots: set[str], tmp_path: Path) -> None:
    """CUDA counts one part of a GPU, however many are named: a process can have no more."""
    if shutil.which("gcc") is None:
        pytest.skip("a driver that counts one GPU is compiled by gcc, which is not installed")
    (tmp_path / "driver.c").write_text(DRIVER)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", "libcuda.so.1", "driver.c"], cwd=tmp_path, check=True)
    (tmp_path / "seen.py").write_text(SEEN)
    own = ["+callbacks.seen={_target_: seen.Seen, notes: seen.txt}", "model=toy", "optimizer.lr=0.1,0.2"]
    command = [sys.executable, "-m", "ddp_recipes", "-m", *ALONE, *own, "hydra/launcher=devices"]
    environ = os.environ | {"LD_LIBRARY_PATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": named}  # read as it starts
    ended = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=patience(120), check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert {*(tmp_path / "seen.txt").read_text().splitlines()} == slots


def _time(line: str) -> float:
    return float(line.split()[1])
