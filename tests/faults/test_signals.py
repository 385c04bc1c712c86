"""A signal stops a run with one checkpoint at one step, and what goes on from there ends with the same bits."""

import os
import pty
import sys
import time
from pathlib import Path
from signal import SIGCONT, SIGHUP, SIGINT, SIGKILL, SIGSTOP, SIGTERM, SIGTSTP, SIGUSR1, Signals

import pytest

from ddp_recipes.runtime.process import is_stopped, name_of, state
from helpers.marks import at_night
from helpers.patience import patience
from helpers.processes import (
    COLD,
    GONE_S,
    ONE_BY_ONE,
    START_S,
    TORCHRUN,
    free_port,
    kill,
    ran,
    started,
    summary,
    until,
    until_saved,
)

pytestmark = [pytest.mark.spawn, pytest.mark.slow]

STEPS = 600
RUN = [
    "data=random",
    "data.num_samples=2000",
    "data.val_samples=40",
    "data.global_batch_size=40",
    "model=toy",
    "model._target_=own_models.Slow",
    "optimizer=adam",
    "trainer.max_epochs=null",
    f"trainer.max_steps={STEPS}",
    "trainer.num_sanity_val_steps=0",
    "hydra.run.dir=run",
]
DISTURBED = [*RUN, "+model.sleep_s=0.02", "checkpoint.every_n_steps=5"]
QUICK = [*RUN, "+model.sleep_s=0"]


def ranks(number: int) -> str:
    """Return the override for so many local processes."""
    return f"launcher.nproc_per_node={number}"


def stopped_at(directory: Path) -> int:
    """Return the step that a run stopped at; see that its newest checkpoint is from there."""
    said = summary(directory)
    assert said["status"] == "preempted"
    step: int = said["global_step"]
    assert 0 < step < STEPS
    newest = max((directory / "checkpoints").glob("step_*.pt"))
    assert newest.name == f"step_{step:08d}.pt"
    assert Path(said["last_checkpoint"]).samefile(directory / "checkpoints" / "last.pt")
    assert newest.samefile(directory / "checkpoints" / "last.pt")
    assert not list(directory.rglob("*.part")), "something was left half written"
    return step


@pytest.mark.parametrize("processes", [*at_night(1), 2])
def test_a_run_that_was_told_to_stop_goes_on_to_the_weights_of_an_undisturbed_one(processes: int, folder: Path) -> None:
    with started(folder, *DISTURBED, ranks(processes)) as run:
        until_saved(run, folder / "run")
        run.signal(SIGTERM)
        ended = run.end()
    assert ended.status == 75
    step = stopped_at(folder / "run")
    assert ended.err == (
        f"Stopped by SIGTERM at step {step}, after a checkpoint was saved. To resume, start again with "
        f"the same hydra.run.dir and ckpt_path=auto.\n"
    )
    resumed = ran(folder, *QUICK, ranks(processes), "ckpt_path=auto")
    assert resumed.status == 0, resumed.err
    undisturbed = ran(folder, *QUICK, ranks(processes), "hydra.run.dir=undisturbed")
    assert undisturbed.status == 0, undisturbed.err
    said, expected = summary(folder / "run"), summary(folder / "undisturbed")
    assert said["status"] == "finished"
    for name in ("global_step", "epoch", "samples_seen", "weights_sha256"):
        assert said[name] == expected[name]


@pytest.mark.parametrize("number", [SIGINT, *at_night(SIGUSR1, SIGHUP)])
def test_one_signal_to_the_launcher_saves_and_ends(number: Signals, folder: Path) -> None:
    with started(folder, *DISTURBED, ranks(2)) as run:
        until_saved(run, folder / "run")
        run.signal(number)
        ended = run.end(GONE_S)
    assert ended.status == 75
    assert ended.err.count("Stopped by") == 1
    assert ended.err == f"{summary(folder / 'run')['error']}\n"
    stopped_at(folder / "run")


@pytest.mark.nightly
def test_a_signal_in_a_slow_validation_is_answered_there_and_the_validation_comes_again(folder: Path) -> None:
    overrides = [
        *RUN,
        "trainer.max_steps=40",
        "data.val_samples=2000",
        "data.val_batch_size=20",
        "trainer.val_check_interval=10",
    ]
    overrides += ["model._target_=own_models.SlowToValidate", "callbacks=ema", "callbacks.ema.decay=0.9"]
    with started(folder, *overrides, ranks(2), "+model.sleep_s=0.3") as run:  # a quarter of a minute for each
        until((folder / "validates_1").exists, START_S, "no validation")
        run.signal(SIGTERM)
        ended = run.end(GONE_S)
    assert (ended.status, stopped_at(folder / "run")) == (75, 10), ended.err
    assert "val/loss" not in summary(folder / "run")["metrics"]
    for directory in ("run", "undisturbed"):
        resumed = ran(folder, *overrides, ranks(2), "+model.sleep_s=0", "ckpt_path=auto", f"hydra.run.dir={directory}")
        assert resumed.status == 0, resumed.err
    said, expected = summary(folder / "run"), summary(folder / "undisturbed")
    assert (said["global_step"], said["weights_sha256"]) == (40, expected["weights_sha256"])
    assert said["metrics"]["val/loss"] == expected["metrics"]["val/loss"]
    log = (folder / "run" / "train.log").read_text()
    assert [log.count(f"step {step}  val/loss") for step in (10, 20, 30, 40)] == [1, 1, 1, 1]


@pytest.mark.parametrize(("processes", "number"), [(1, SIGTERM), *at_night((1, SIGHUP), (2, SIGTERM))])
def test_a_signal_ends_an_evaluation_and_its_summary_says_so(processes: int, number: Signals, folder: Path) -> None:
    slow = ["model._target_=own_models.SlowToValidate", "+model.sleep_s=0.3", "data.val_samples=2000"]
    with started(folder, *RUN, *slow, ranks(processes), "mode=validate") as run:
        until((folder / "validates_0").exists, START_S, "no validation")
        run.signal(number)
        ended = run.end(GONE_S)
    assert ended.status == 130
    assert f"stopped by {number.name}" in ended.err
    assert summary(folder / "run")["status"] == "failed"
    assert f"stopped by {number.name}" in summary(folder / "run")["error"]


def test_sigterm_to_torchrun_ends_an_evaluation_and_its_summary_says_so(folder: Path) -> None:
    slow = ["model._target_=own_models.SlowToValidate", "+model.sleep_s=0.3", "data.val_samples=2000"]
    with started(folder, *RUN, *slow, "mode=validate", command=TORCHRUN) as run:
        until((folder / "validates_1").exists, START_S, "no validation")
        run.signal(SIGTERM)
        ended = run.end()
    assert ended.status != 0
    assert summary(folder / "run")["status"] == "failed"
    assert "stopped by SIGTERM" in summary(folder / "run")["error"]


@pytest.mark.parametrize("workers", [*at_night(0), 2])
def test_ctrl_z_suspends_all_ranks_for_longer_than_a_collective_may_take(workers: int, folder: Path) -> None:
    timeout_s = patience(4)
    data = [*ONE_BY_ONE, f"data.num_workers={workers}", "data.persistent_workers=true"] if workers else []
    with started(folder, *DISTURBED, *data, ranks(2), f"launcher.timeout_s={timeout_s}") as run:
        until_saved(run, folder / "run")
        fork_server = state(run.rank(0))[1]
        suspended = run.pids().keys() - {fork_server}
        run.signal(SIGTSTP)
        until(lambda: all(map(is_stopped, suspended)), GONE_S, "some do not stop")
        since = time.monotonic()
        until(lambda: time.monotonic() > since + timeout_s + 1, timeout_s + 5, "time stands still")
        run.signal(SIGCONT)
        until(lambda: not any(map(is_stopped, suspended)), GONE_S, "some stay stopped")
        before = os.listdir(folder / "run" / "checkpoints")
        until(lambda: os.listdir(folder / "run" / "checkpoints") != before, START_S, "nothing is trained")
        run.signal(SIGTERM)
        ended = run.end()
    assert ended.status == 75, ended.err
    stopped_at(folder / "run")


@pytest.mark.parametrize("command", [None, *at_night(TORCHRUN)])
def test_a_scheduler_that_suspends_and_continues_all_within_a_step_has_them_go_on(
    command: list[str] | None, folder: Path
) -> None:
    """Slurm sends SIGTSTP, SIGSTOP after a while, and SIGCONT to go on."""
    held = ["model._target_=own_models.InOneCall", "trainer.max_steps=3"]
    with started(folder, *RUN, *held, *([ranks(2)] if command is None else []), command=command) as run:
        until(lambda: len(list(folder.glob("begun_*"))) == 2, START_S, "no first step")
        for pid in (run.pid,) if command is None else (run.rank(0), run.rank(1)):
            kill(pid, SIGTSTP)
        until(lambda: len(list(folder.glob(f"got_{SIGTSTP:d}_*"))) == 2, GONE_S, "the signal is not passed on")
        suspended = run.pids()
        for number in (SIGSTOP, SIGCONT):
            for pid in suspended:
                kill(pid, number)
        ended = run.end()
    assert ended.status == 0, ended.err
    assert summary(folder / "run")["status"] == "finished"


@pytest.mark.parametrize("processes", [*at_night(1), 2])
def test_a_terminal_that_is_closed_stops_a_run_after_a_checkpoint(processes: int, folder: Path) -> None:
    keyboard, screen = pty.openpty()
    with started(folder, *DISTURBED, ranks(processes), terminal=screen) as run:
        os.close(screen)
        until_saved(run, folder / "run")
        os.close(keyboard)
        ended = run.end(GONE_S)
    assert ended.status == 75
    stopped_at(folder / "run")


def test_nohup_keeps_a_run_going(folder: Path) -> None:
    command = ["nohup", sys.executable]
    with started(folder, *DISTURBED, ranks(2), "trainer.max_steps=60", command=command) as run:
        until_saved(run, folder / "run")
        for pid in run.pids():
            kill(pid, SIGHUP)
        ended = run.end()
    assert ended.status == 0, ended.err
    assert summary(folder / "run")["status"] == "finished"


@pytest.mark.parametrize("workers", [*at_night(0), 2])
def test_a_signal_to_every_process_at_once_saves_and_ends(workers: int, folder: Path) -> None:
    with started(folder, *DISTURBED, *ONE_BY_ONE, f"data.num_workers={workers}", ranks(2)) as run:
        until_saved(run, folder / "run")
        for pid in run.pids():  # as a service manager does, or a cluster that ends a job
            kill(pid, SIGTERM)
        ended = run.end(GONE_S)
    assert ended.status == 75
    stopped_at(folder / "run")


@pytest.mark.parametrize("processes", [*at_night(1), 2])
def test_a_second_ctrl_c_ends_at_once(processes: int, folder: Path) -> None:
    overrides = [*RUN, "model._target_=own_models.Stuck", "checkpoint.every_n_steps=1"]
    with started(folder, *overrides, ranks(processes)) as run:
        until(lambda: len(list(folder.glob("begun_*"))) == processes, START_S, "no first step")
        run.signal(SIGINT)
        until(lambda: not pending(run.pid, SIGINT), GONE_S, "the first one is not taken")
        assert run.process.poll() is None
        run.signal(SIGINT)
        ended = run.end(GONE_S)
    assert ended.status == 130
    assert ended.err == "Interrupted.\n"
    assert summary(folder / "run")["status"] == "failed"


def caught(pid: int, number: Signals) -> bool:
    """Whether a process has a handler of its own for a signal."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (mask,) = (line.split()[1] for line in lines if line.startswith("SigCgt"))
    return bool(int(mask, 16) >> (number - 1) & 1)


def pending(pid: int, number: Signals) -> bool:
    """Whether a signal has been sent and not yet been taken."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    masks = [int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd", "ShdPnd"))]
    return any(mask >> (number - 1) & 1 for mask in masks)


@pytest.mark.parametrize(("processes", "number"), [(1, SIGTERM), *at_night((2, SIGINT), (1, SIGINT), (2, SIGTERM))])
def test_a_signal_after_the_end_changes_nothing(processes: int, number: Signals, folder: Path) -> None:
    with started(folder, *QUICK, "trainer.max_steps=20", ranks(processes)) as run:
        printed = folder / f"{run.mark}.out"
        until(lambda: "finished in" in printed.read_text(), START_S, "it does not end")
        run.signal(number)
        ended = run.end(GONE_S)
    assert ended.status == 0
    assert ended.err == ""
    assert summary(folder / "run")["status"] == "finished"


def test_ctrl_c_with_a_stopped_rank_ends_all_the_same(folder: Path) -> None:
    with started(folder, *DISTURBED, ranks(2)) as run:
        until_saved(run, folder / "run")
        kill(run.rank(1), SIGSTOP)
        run.signal(SIGINT)
        ended = run.end(GONE_S)
    assert ended.status == 130
    said, newest = summary(folder / "run"), int(max((folder / "run/checkpoints").glob("step_*")).stem[5:])
    assert said["status"] == "failed"
    assert said["error"] == f"stopped by SIGINT before another checkpoint was saved; the newest is of step {newest}"
    assert (said["global_step"], said["samples_seen"]) == (newest, 40 * newest), (
        "how far it came, for all that is known"
    )
    assert said["last_checkpoint"] == str(folder / "run/checkpoints/last.pt")


@pytest.mark.parametrize("number", [SIGINT, *at_night(SIGTERM)])
def test_a_signal_before_training_leaves_nothing(number: Signals, folder: Path) -> None:
    with started(folder, *RUN, "model._target_=own_models.Huge", ranks(2)) as run:
        until(lambda: "1" in run.pids().values(), START_S, "no rank")
        run.signal(number)
        ended = run.end(GONE_S)
    assert ended.status == 130
    assert "Traceback" not in ended.err
    assert not (folder / "run").exists()


TOLD = """
import os
import signal

from ddp_recipes.launchers.local import LocalLauncher


class Told(LocalLauncher):
    def launch(self, job):
        os.kill(os.getpid(), signal.SIGTERM)
        return super().launch(job)
"""


@pytest.mark.parametrize("processes", [1, *at_night(2)])
def test_a_signal_before_anything_is_started_leaves_nothing(processes: int, folder: Path) -> None:
    (folder / "told.py").write_text(TOLD)
    ended = ran(folder, *QUICK, ranks(processes), "launcher=local", "launcher._target_=told.Told")
    assert (ended.status, ended.err) == (130, "Interrupted: stopped by SIGTERM.\n")
    assert not (folder / "run").exists()


def test_a_signal_before_ranks_have_met_ends_rank_0_at_once_and_leaves_nothing(folder: Path) -> None:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    first = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", **address}
    with started(folder, *QUICK, environ=first) as run:
        until((folder / "run").exists, START_S, "no directory")
        run.signal(SIGTERM)
        ended = run.end(GONE_S)
    assert (ended.status, ended.err) == (130, "Interrupted: stopped by SIGTERM.\n")
    assert not (folder / "run").exists()


LOADS_LONG = """
import time
from pathlib import Path

if b"launchers.forking" in Path("/proc/self/cmdline").read_bytes():
    while True:
        time.sleep(1)
"""


def test_a_signal_while_torch_is_loaded_ends_a_run_at_once(folder: Path) -> None:
    (folder / "sitecustomize.py").write_text(LOADS_LONG)
    environ = {"PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"}
    with started(folder, *QUICK, ranks(2), command=COLD, environ=environ) as run:
        until(lambda: caught(run.pid, SIGTSTP), START_S, "no launcher")
        run.signal(SIGTERM)
        ended = run.end(GONE_S)
    assert ended.status == 130
    assert not (folder / "run").exists()


def test_ctrl_c_ends_a_sweep(folder: Path) -> None:
    overrides = [*DISTURBED, ranks(2), "seed=1,2", "hydra.sweep.dir=sweep"]
    with started(folder, "-m", *overrides) as run:
        until_saved(run, folder / "sweep" / "0")
        run.signal(SIGINT)
        ended = run.end(GONE_S)
    assert ended.status == 75
    stopped_at(folder / "sweep" / "0")
    assert not (folder / "sweep" / "1").exists()


@pytest.mark.parametrize(
    ("own", "begun", "status", "said"),
    [
        (["checkpoint=none"], "sweep/0/summary.json", 1, "Stopped by SIGTERM at step {}; checkpoints are off"),
        (
            ["trainer.max_steps=5", "+callbacks.held._target_=own_models.HeldAtEnd"],
            "held",
            75,
            "The sweep was stopped by SIGTERM.",
        ),
    ],
    ids=["a job without checkpoints", "a job that has come to its end"],
)
def test_a_signal_ends_a_sweep_whatever_its_job_comes_to(
    own: list[str], begun: str, status: int, said: str, folder: Path
) -> None:
    sweep = ["+model.sleep_s=0.02", ranks(1), "seed=1,2", "hydra.sweep.dir=sweep"]
    with started(folder, "-m", *RUN, *sweep, *own) as run:
        until((folder / begun).exists, START_S, "no job")
        run.signal(SIGTERM)
        (folder / "attacked").touch()
        ended = run.end(GONE_S)
    assert ended.status == status
    assert ended.err.startswith(said.format(summary(folder / "sweep" / "0")["global_step"]))
    assert not (folder / "sweep" / "1").exists()


@pytest.mark.parametrize(
    ("launcher", "number"), [("joblib", SIGTERM), ("devices", SIGTERM), *at_night(("joblib", SIGKILL))]
)
def test_a_signal_to_a_sweep_reaches_its_jobs_in_processes_of_their_own(
    launcher: str, number: Signals, folder: Path
) -> None:
    if launcher == "joblib":
        pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason="it is not installed")
    at_once = {"joblib": "hydra.launcher.n_jobs=2", "devices": "hydra.launcher.slots=2"}[launcher]
    sweep = ["seed=1,2,3", "hydra.sweep.dir=sweep", f"hydra/launcher={launcher}", at_once]
    with started(folder, "-m", *DISTURBED, ranks(1), *sweep, command=COLD) as run:
        for job in ("0", "1"):
            until_saved(run, folder / "sweep" / job)
        run.signal(number)
        ended = run.end()
    assert not (folder / "sweep" / "2").exists()
    if number == SIGTERM:
        assert ended.status == 75
        for job in ("0", "1"):
            stopped_at(folder / "sweep" / job)


@pytest.mark.parametrize("launcher", ["devices", *at_night("joblib")])
def test_a_terminal_that_is_closed_stops_jobs_in_processes_of_their_own_after_checkpoints(
    launcher: str, folder: Path
) -> None:
    """What they print then reaches nobody."""
    if launcher == "joblib":
        pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason="it is not installed")
    at_once = {"joblib": "hydra.launcher.n_jobs=2", "devices": "hydra.launcher.slots=2"}[launcher]
    sweep = ["seed=1,2", "hydra.sweep.dir=sweep", f"hydra/launcher={launcher}", at_once, "trainer.progress=false"]
    keyboard, screen = pty.openpty()
    with started(folder, "-m", *DISTURBED, ranks(1), *sweep, terminal=screen) as run:
        os.close(screen)
        for job in ("0", "1"):
            until_saved(run, folder / "sweep" / job)
        os.close(keyboard)
        ended = run.end()
    assert ended.status == 75
    for job in ("0", "1"):
        stopped_at(folder / "sweep" / job)


@pytest.mark.parametrize("processes", [*at_night(2), 1])
def test_a_job_of_joblib_that_is_killed_ends_a_sweep_that_says_so(processes: int, folder: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason="it is not installed")
    sweep = ["seed=1,2,3", "hydra.sweep.dir=sweep", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    with started(folder, "-m", *DISTURBED, ranks(processes), *sweep, command=COLD) as run:
        for job in ("0", "1"):
            until_saved(run, folder / "sweep" / job)
        kill(next(pid for pid in run.pids() if name_of(pid) == "job 0"), SIGKILL)
        ended = run.end()
    assert ended.status == 1
    assert "Traceback" not in ended.err
    assert "A process that ran a job died (SIGKILL(-9)): jobs that ran then ended (0, 1).\n" in ended.err
    for job in ("0", "1"):
        said = summary(folder / "sweep" / job)
        assert said["status"] == "failed"
        assert "SIGKILL" in said["error"]


@pytest.mark.nightly
def test_a_job_that_is_not_yet_training_does_not_cost_another_its_checkpoint(folder: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason="it is not installed")
    sweep = ["hydra.sweep.dir=sweep", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    models = [
        "model._target_=own_models.Slow,own_models.Huge",
        "trainer.max_steps=100000",
        "checkpoint.every_n_steps=5",
    ]
    with started(folder, "-m", *RUN, ranks(1), *sweep, *models, command=COLD) as run:
        until_saved(run, folder / "sweep" / "0")
        until((folder / "sweep" / "1").exists, START_S, "no second job")
        run.signal(SIGTERM)
        ended = run.end()
    assert ended.status == 75
    assert summary(folder / "sweep" / "0")["status"] == "preempted"


@pytest.mark.nightly
@pytest.mark.parametrize("workers", [0, 2])
def test_sigterm_to_torchrun_saves_one_checkpoint(workers: int, folder: Path) -> None:
    """It sends one to whole process groups, each of a rank and its data workers."""
    with started(folder, *DISTURBED, *ONE_BY_ONE, f"data.num_workers={workers}", command=TORCHRUN) as run:
        until_saved(run, folder / "run")
        run.signal(SIGTERM)
        ended = run.end()
    assert ended.status != 0
    assert "after a checkpoint was saved" in ended.err
    stopped_at(folder / "run")
