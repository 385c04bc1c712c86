"""Runs on a real Slurm of two nodes: joined with srun, submitted with launcher=slurm, preempted, swept."""

import os
import shlex
import shutil
import signal
import socket
import subprocess
from functools import partial
from pathlib import Path

import pytest

from benchmarks.cluster import Cluster
from helpers.patience import patience
from helpers.processes import COLD, OWN_MODELS, TRAIN, Ended, ran, started, summary, until, until_saved
from helpers.warm import warm

pytestmark = [pytest.mark.slow, pytest.mark.spawn]
pytest.importorskip("submitit", reason="launcher=slurm needs the extra 'slurm'")

TINY = (
    "data=random",
    "data.num_samples=64",
    "data.val_samples=21",
    "data.global_batch_size=16",
    "model=toy",
    "trainer.max_epochs=2",
    "trainer.progress=false",
    "logger=none",
    "launcher.device=cpu",
)
# Long enough to be disturbed: 200 steps of at least 0.02 s.
LONG = (*TINY, "data.num_samples=320", "trainer.max_epochs=10", "model._target_=own_models.Slow", "+model.sleep_s=0.02")
SUBMIT = ("launcher=slurm", "launcher.nnodes=2")
END_S = 60.0
RUN_DIRECTORY = {".hydra", "checkpoints", "config.yaml", "summary.json", "train.log"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder but for ``own_models.py``, which the ranks must find."""
    shutil.copy(OWN_MODELS, tmp_path)
    return tmp_path


def srun(*options: str) -> list[str]:
    return ["srun", "--nodes=2", "--ntasks-per-node=1", *options, warm()]


def done(ended: Ended) -> Ended:
    assert ended.status == 0, f"{ended.out}\n{ended.err}"
    return ended


def files(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def job_of(directory: Path) -> str:
    return (directory / "slurm" / "job_id").read_text().strip()


# --- srun ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inherited", [{}, {"SLURM_PTY_PORT": "40000"}], ids=["", "in a shell of srun --pty"])
def test_srun_joins_the_tasks_in_one_directory_with_the_weights_of_a_local_run(
    inherited: dict[str, str], slurm: Cluster, folder: Path
) -> None:
    done(ran(folder, *TINY, "hydra.run.dir=there", command=srun(), environ={**slurm.environ, **inherited}))
    done(ran(folder, *TINY, "hydra.run.dir=here", "launcher.nproc_per_node=2"))
    there, here = summary(folder / "there"), summary(folder / "here")
    assert files(folder / "there") == RUN_DIRECTORY
    assert not (folder / "outputs").exists()
    assert (there["world_size"], there["nnodes"]) == (2, 2)
    assert there["weights_sha256"] == here["weights_sha256"]


def test_srun_runs_every_job_of_a_sweep_on_all_tasks(slurm: Cluster, folder: Path) -> None:
    sweep = ("optimizer.lr=0.1,0.01", "hydra.sweep.dir=sweep")
    done(ran(folder, "-m", *TINY, *sweep, command=srun(), environ=slurm.environ))
    for number in ("0", "1"):
        assert files(folder / "sweep" / number) == RUN_DIRECTORY
        assert summary(folder / "sweep" / number)["world_size"] == 2


def test_an_allocation_with_other_tasks_than_asked_for_is_refused_once(slurm: Cluster, folder: Path) -> None:
    asked = "launcher.nproc_per_node=2"
    ended = ran(folder, *TINY, asked, "hydra.run.dir=run", command=srun(), environ=slurm.environ)
    assert ended.status == 2
    assert ended.err.count(f"{asked}, but Slurm started this step with --ntasks-per-node=1") == 1
    assert "Traceback" not in ended.err
    assert not (folder / "run").exists()


def test_the_tasks_of_a_job_array_get_a_directory_each(slurm: Cluster, folder: Path) -> None:
    command = shlex.join(["srun", warm(), TRAIN, *TINY, "hydra.run.dir=outputs/${now:%Y}"])
    script = ["sbatch", "--parsable", "--array=0-1", f"--chdir={folder}", "--output=array_%a.log", "--wrap", command]
    job = slurm.command(*script)
    until(lambda: not slurm.command("squeue", "--noheader"), END_S, "the array does not end")
    printed = "\n".join(path.read_text() for path in folder.glob("array_*.log"))
    directories = sorted((folder / "outputs").iterdir())
    assert [summary(path)["status"] for path in directories] == ["finished"] * 2, f"{job}\n{printed}"


@pytest.mark.nightly
def test_a_lost_node_leaves_the_run_to_the_others_with_the_same_bits(slurm: Cluster, folder: Path) -> None:
    exact = (*LONG, "strategy=ddp_exact", "strategy.shards=4")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    nodes = ("launcher=nodes", f"launcher.rdzv_endpoint=127.0.0.1:{port}", "launcher.nproc_per_node=1")
    overrides = (*exact, *nodes, "ckpt_path=auto", "hydra.run.dir=run")
    # Both nodes are this machine, so whoever came first would hold the store: the first one does.
    waits = f"until [ $SLURM_NODEID = 0 ] || (echo > /dev/tcp/127.0.0.1/{port}) 2>/dev/null; do sleep 0.1; done"
    run = f"{waits}; echo $$ > task_$SLURM_NODEID; exec {shlex.join([*COLD, TRAIN, *overrides])}"
    command = ["srun", "--no-kill", "--nodes=2", "--ntasks-per-node=1", "bash", "-c", run]
    environ = {**os.environ, **slurm.environ, "DDP_RECIPES_KEY": "a secret that these nodes have"}
    with subprocess.Popen(command, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as job:
        log = folder / "run" / "train.log"
        until(lambda: log.exists() and "epoch 2" in log.read_text(), END_S, "it does not begin")
        slurm.lose_node("127.0.0.2", int((folder / "task_1").read_text()))
        try:
            until(lambda: summary(folder / "run")["status"] == "finished", END_S, "it does not go on")
        finally:
            slurm.start_node("127.0.0.2")
            job.kill()
    found = summary(folder / "run")
    assert (found["world_size"], found["ranks_replaced"]) == (1, 1)
    done(ran(folder, *exact, "hydra.run.dir=whole", "launcher.nproc_per_node=1"))
    assert found["weights_sha256"] == summary(folder / "whole")["weights_sha256"]


# --- launcher=slurm --------------------------------------------------------------------------------------------------


def test_a_submitted_run_ends_as_a_local_one_does(slurm: Cluster, folder: Path) -> None:
    ended = done(ran(folder, *TINY, *SUBMIT, "hydra.run.dir=run", environ=slurm.environ))
    run = summary(folder / "run")
    assert (run["status"], run["world_size"], run["nnodes"]) == ("finished", 2, 2)
    assert files(folder / "run") == RUN_DIRECTORY | {"slurm"}
    assert f"Slurm job {job_of(folder / 'run')}: completed" in ended.out  # a short one may never be seen running
    assert "there is no key" not in (folder / "run" / "train.log").read_text()  # the launcher made one
    assert "val/loss" in ended.out  # what rank 0 prints is shown here
    assert "submitit" not in ended.out


@pytest.mark.nightly
def test_a_failing_rank_is_named_with_its_own_traceback(slurm: Cluster, folder: Path) -> None:
    fault = ("model._target_=own_models.Faulty", "+model.what=raise", "+model.rank=1")
    ended = ran(folder, *TINY, *SUBMIT, *fault, "hydra.run.dir=run", environ=slurm.environ)
    assert ended.status == 1
    first, *rest = ended.err.strip().splitlines()
    assert first == "Rank 1 failed:"
    assert rest[-1] == "ValueError: the cat sat on the keyboard"
    assert summary(folder / "run")["status"] == "failed"
    assert slurm.state(job_of(folder / "run"))["JobState"] == "FAILED"


@pytest.mark.nightly
def test_a_killed_rank_is_named_and_leaves_no_other_one(slurm: Cluster, folder: Path) -> None:
    fault = ("model._target_=own_models.Faulty", "+model.what=kill", "+model.rank=1")
    ended = ran(folder, *TINY, *SUBMIT, *fault, "hydra.run.dir=run", environ=slurm.environ)
    assert ended.status == 1
    assert ended.err.startswith(f"Rank 1 of Slurm job {job_of(folder / 'run')} exited without a traceback: Killed")
    assert "Rank 1" in summary(folder / "run")["error"]


@pytest.mark.nightly
def test_without_waiting_the_number_is_all_that_comes_back(slurm: Cluster, folder: Path) -> None:
    held = "+launcher.sbatch.hold=true"  # it does not start, so nothing can be waited for
    ended = done(ran(folder, *TINY, *SUBMIT, held, "launcher.wait=false", "hydra.run.dir=run", environ=slurm.environ))
    job = job_of(folder / "run")
    assert f"scancel {job} ends it" in ended.out
    assert slurm.state(job)["JobState"] == "PENDING"
    assert slurm.state(job)["NumNodes"].startswith("2")
    slurm.command("scontrol", "release", job)
    until(lambda: slurm.state(job)["JobState"] == "COMPLETED", END_S, "the job did not complete")
    assert summary(folder / "run")["status"] == "finished"


def test_ctrl_c_leaves_the_job_and_says_how_to_end_it(slurm: Cluster, folder: Path) -> None:
    directory = folder / "run"
    with started(folder, *LONG, *SUBMIT, "hydra.run.dir=run", command=COLD, environ=slurm.environ) as run:
        until_saved(run, directory)
        run.signal(signal.SIGINT)
        assert run.process.wait(patience(10)) == 130
        job = job_of(directory)
        assert f"scancel {job} ends it" in (folder / f"{run.mark}.err").read_text()
        assert slurm.state(job)["JobState"] == "RUNNING"
        slurm.command("scancel", job)
        run.see_all_gone()


def test_a_cancelled_job_saves_a_checkpoint_and_stays_cancelled(slurm: Cluster, folder: Path) -> None:
    with started(folder, *LONG, *SUBMIT, "hydra.run.dir=run", command=COLD, environ=slurm.environ) as run:
        until_saved(run, folder / "run")
        slurm.command("scancel", job_of(folder / "run"))
        ended = run.end()
    assert ended.status == 75, ended.err
    assert summary(folder / "run")["status"] == "preempted"
    assert slurm.state(job_of(folder / "run"))["JobState"] == "CANCELLED"


def test_a_preempted_job_goes_on_in_its_directory_and_ends_as_an_undisturbed_run(slurm: Cluster, folder: Path) -> None:
    done(ran(folder, *LONG, "hydra.run.dir=undisturbed", "launcher.nproc_per_node=2"))
    with started(folder, *LONG, *SUBMIT, "hydra.run.dir=run", command=COLD, environ=slurm.environ) as run:
        until_saved(run, folder / "run")
        job = job_of(folder / "run")
        slurm.command("scancel", "--signal=USR1", job)  # as --signal does before the end of the time
        until(lambda: slurm.state(job).get("Reason") == "BeginTime", END_S, "the job was not queued again")
        assert summary(folder / "run")["status"] == "preempted"
        # Slurm waits two minutes, so that its nodes are through with the job and its credential's second is over.
        assert slurm.await_idle(), "the nodes are not free"
        slurm.command("scontrol", "update", f"JobId={job}", "StartTime=now+2")
        done(run.end())
    after = summary(folder / "run")
    assert slurm.state(job)["Restarts"] == "1"
    assert job_of(folder / "run") == job
    assert after["status"] == "finished"
    assert after["weights_sha256"] == summary(folder / "undisturbed")["weights_sha256"]


@pytest.mark.nightly
def test_without_requeue_a_preempted_job_ends_with_75(slurm: Cluster, folder: Path) -> None:
    once = "launcher.requeue=false"
    with started(folder, *LONG, *SUBMIT, once, "hydra.run.dir=run", command=COLD, environ=slurm.environ) as run:
        until_saved(run, folder / "run")
        slurm.command("scancel", "--signal=USR1", job_of(folder / "run"))
        ended = run.end()
    assert ended.status == 75, ended.err
    assert "Stopped by SIGUSR1" in ended.err


def test_what_a_rank_refuses_is_told_here_and_leaves_nothing(slurm: Cluster, folder: Path) -> None:
    wrong = "strategy.sync_batchnorm=true"
    ended = ran(folder, *TINY, *SUBMIT, wrong, "hydra.run.dir=run", environ=slurm.environ)
    assert ended.status == 2
    assert ended.err.startswith(wrong)
    assert not (folder / "run").exists()


REFUSED = {
    "option that sbatch does not know": ("+launcher.sbatch.nonsense=1", "unrecognized option '--nonsense=1'"),
    "partition that is not there": ("launcher.partition=gpus", "invalid partition specified: gpus"),
    "option that has a key": ("+launcher.sbatch.nodes=2", "Use launcher.nnodes"),
    "directory that Slurm would rename": ("hydra.run.dir=run%j", "/run%j: Slurm fills in"),
    "unknown key": ("launcher.nodes=2", "Did you mean 'launcher.nnodes'?"),
    "no time left to train": ("launcher.signal_s=3600", "launcher.time_min=60"),
    "restarts here": ("launcher.max_restarts=1", "launcher.requeue=true"),
    "GPUs too few for a replica": (
        "launcher.gpus_per_node=1 model=toy_mp launcher.device=cuda",
        "0 replica(s) do",
    ),
    "single process on two nodes": ("strategy=single", "Use strategy=ddp for more"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_request_is_refused_before_anything_is_queued(slurm: Cluster, folder: Path, case: str) -> None:
    overrides, message = REFUSED[case]
    ended = ran(folder, *TINY, *SUBMIT, "hydra.run.dir=run", *overrides.split(), environ=slurm.environ)
    assert ended.status == 2
    assert message in ended.err
    assert len(ended.err.strip().splitlines()) == 1
    assert not list(folder.glob("run*"))
    assert slurm.command("squeue", "--noheader") == ""


def test_without_sbatch_it_says_where_to_run_it(folder: Path) -> None:
    ended = ran(folder, *TINY, *SUBMIT, "hydra.run.dir=run", environ={"PATH": os.devnull})
    assert ended.status == 2
    assert "launcher=slurm needs sbatch and srun, which are not on the PATH" in ended.err
    assert not (folder / "run").exists()


def test_the_directory_of_a_queued_job_is_refused_and_left_as_it_is(slurm: Cluster, folder: Path) -> None:
    held = ("+launcher.sbatch.hold=true", "launcher.wait=false", "hydra.run.dir=run")
    done(ran(folder, *TINY, *SUBMIT, *held, environ=slurm.environ))
    job, before = job_of(folder / "run"), sorted((folder / "run").rglob("*"))
    for other in ("strategy.sync_batchnorm=true", "launcher.partition=gpus", "launcher.wait=false"):
        ended = ran(folder, *TINY, *SUBMIT, other, "hydra.run.dir=run", environ=slurm.environ)
        assert ended.status == 2
        assert f"belongs to Slurm job {job}, whose state is: pending" in ended.err
        assert sorted((folder / "run").rglob("*")) == before
    slurm.command("scontrol", "release", job)
    until(lambda: slurm.state(job)["JobState"] == "COMPLETED", END_S, "the job did not complete")
    assert summary(folder / "run")["status"] == "finished"


@pytest.mark.nightly
def test_of_two_submissions_to_one_directory_one_is_refused_and_the_other_finishes(
    slurm: Cluster, folder: Path
) -> None:
    submitted = [*TINY, *SUBMIT, "hydra.run.dir=run"]
    start = partial(started, folder, *submitted, environ=slurm.environ)
    with start() as one, start() as two:
        both = sorted([one.end(), two.end()], key=lambda ended: ended.status)
    assert [ended.status for ended in both] == [0, 2], both
    assert "choose another hydra.run.dir" in both[1].err
    assert "Traceback" not in both[1].err
    assert summary(folder / "run")["status"] == "finished"


# --- Hydra's own launcher for Slurm ----------------------------------------------------------------------------------


@pytest.mark.nightly
def test_a_sweep_of_hydras_submitit_launcher_makes_one_run_of_each_jobs_tasks(slurm: Cluster, folder: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher.config")
    launcher = ("hydra/launcher=submitit_slurm", "hydra.launcher.nodes=2", "hydra.launcher.timeout_min=20")
    sweep = ("optimizer.lr=0.1,0.01", "hydra.sweep.dir=sweep", *launcher)
    ended = done(ran(folder, "-m", *TINY, *sweep, environ=slurm.environ))
    for number in ("0", "1"):
        assert files(folder / "sweep" / number) == RUN_DIRECTORY
        assert summary(folder / "sweep" / number)["nnodes"] == 2
    assert ended.out.count("objective") == 2  # the table has both
