"""A wrong request ends with status 2 and one message: what was given, what is allowed, what to do."""

import os
import pickle
import shutil
import sys
from pathlib import Path

import pytest
import torch

import ddp_recipes
from ddp_recipes.config.request import Request
from ddp_recipes.devices import of_gpus
from ddp_recipes.errors import RequestError
from ddp_recipes.testing import make_job
from helpers.marks import slow_but
from helpers.processes import TORCHRUN, Ended, ran, summary

ONE = "launcher.nproc_per_node=1"
TWO = "launcher.nproc_per_node=2"
SHORT = ("data=random", "data.num_samples=64", "data.val_samples=32", "model=toy", "trainer.max_epochs=1", ONE)

# Name of the case: (overrides, parts of the message).
REFUSED_BEFORE_ANY_RANK: dict[str, tuple[list[str], list[str]]] = {
    "unknown option": (["model=mpl"], ["model=mpl", "linear, mlp, resnet18", "Did you mean 'mlp'?"]),
    "unknown group": (["optimiser=adam"], ["optimiser=adam", "Did you mean 'optimizer'?"]),
    "unknown key": (["sed=1"], ["sed", "Did you mean 'seed'?"]),
    "unknown key in a group": (["optimizer.lrr=1"], ["optimizer.lrr=1", "Did you mean 'optimizer.lr'?", "momentum"]),
    "added key that nothing reads": (["+trainer.max_epoch=3"], ["trainer.max_epoch", "Did you mean 'max_epochs'?"]),
    "text for a number": (["trainer.max_epochs=ten"], ["trainer.max_epochs=ten", "a whole number", "or null"]),
    "number for a switch": (["data.drop_last=3"], ["data.drop_last=3", "true, false"]),
    "value that is not among the allowed": (["mode=fitt"], ["mode=fitt", "validate", "Did you mean 'fit'?"]),
    "batch size of 0": (["data.batch_size=0"], ["data.batch_size=0", "at least 1"]),
    "time that is none": (["trainer.max_time=soon"], ["trainer.max_time=soon", "DD:HH:MM:SS"]),
    "no limit": (["trainer.max_epochs=null"], ["trainer.max_epochs", "trainer.max_steps", "set one of them"]),
    "broken override": (["data.batch_size"], ["data.batch_size"]),
    "missing interpolation": (["model.in_features=${data.no_such}"], ["model.in_features", "data.no_such"]),
    "no GPU": (["launcher.device=cuda"], ["launcher.device=cuda", "no GPU is visible", "launcher.device=cpu"]),
    "NCCL without GPU": (["launcher.backend=nccl"], ["launcher.backend=nccl", "launcher.backend=gloo"]),
    "NCCL on CPU": (
        ["launcher.backend=nccl", "launcher.device=cpu"],
        ["launcher.backend=nccl", "launcher.backend=gloo"],
    ),
    "image model on a table": (["model=resnet18"], ["model.in_channels", "data.in_channels", "Choose another data"]),
    "two processes for single": (["strategy=single", TWO], ["nproc_per_node=2", "one process", "strategy=ddp"]),
    "more ranks than a machine bears": (
        ["launcher.nproc_per_node=3000", "launcher.device=cpu"],
        ["launcher.nproc_per_node=3000", "core", "launcher.oversubscribe=true"],
    ),
    "several nodes for the local launcher": (["launcher.nnodes=2"], ["launcher.nnodes=2", "torchrun"]),
    "launcher=env without a rank": (["launcher=env"], ["launcher=env", "RANK", "torchrun"]),
    "export of nothing": (["mode=export"], ["mode=export needs ckpt_path", "a run directory or a checkpoint file"]),
    "no config folder": (["--config-dir", "nowhere"], ["--config-dir nowhere", "no folder"]),
    "list for a group": (["model=[1]"], ["model=[1]: there is no such option", "linear, mlp"]),
    "deletion of a group as a number": (["~launcher=1"], ["~launcher=1: there is no such option", "auto"]),
    "option of 300 letters": ([f"model={'a' * 300}"], ["model=aaa", "there is no such option"]),
    "no option": (["callbacks=''"], ["callbacks=", "early_stopping"]),
    "key of a section alone": (["lr=0.1"], ["lr=0.1", "Did you mean 'optimizer.lr'?"]),
    "key that nothing reads": (["+lr=0.1"], ["+lr=0.1", "nothing refers to it"]),
    "option as a key": (["ema=true"], ["ema=true", "Did you mean 'callbacks=ema'?"]),
    "key of Lightning": (["trainer.gpus=2"], ["trainer.gpus=2", "launcher.nproc_per_node"]),
    "removed key of Lightning": (["trainer.auto_lr_find=true"], ["trainer.auto_lr_find=true", "tune=lr"]),
    "no list of packages": (["trusted_packages=1"], ["trusted_packages=1", "a list of names of packages"]),
    "csv without a path": (["data=csv", "data.inputs=[a]", "data.target=y", "data.out_features=2"], ["data.path"]),
}

REFUSED_BY_A_RANK: dict[str, tuple[list[str], list[str]]] = {
    "no MNIST": (["data=mnist", "data.root=here"], ["data.root=here", "MNIST/raw", "data.download=true"]),
    "no image folder": (
        ["data=image_folder", "data.root=here", "data.out_features=3", "model=resnet18"],
        ["data.root=here", "here/train", "Set data.root"],
    ),
    "text that is a pipe": (["data=text", "data.path=pipe", "model=gpt"], ["data.path=pipe has no file, or is none"]),
    "csv that is a pipe": (
        ["data=csv", "data.path=pipe", "data.inputs=[a]", "data.target=y", "data.out_features=2"],
        ["data.path=pipe", "no regular file"],
    ),
    "no csv": (
        ["data=csv", "data.path=no.csv", "data.inputs=[a]", "data.target=y", "data.out_features=2"],
        ["data.path=no.csv"],
    ),
    "csv without the column": (
        ["data=csv", "data.path=t.csv", "data.inputs=[wide,long]", "data.target=kind", "data.out_features=2"],
        ["t.csv has no column 'long'", "Did you mean 'length'?", "wide, length, kind, value"],
    ),
    "unknown target": (["model._target_=own_models.Nobody"], ["model._target_=own_models.Nobody"]),
    "target in no module": (["model._target_=no_such_module.Model"], ["no_such_module"]),
    "target that is no model": (
        ["model._target_=collections.OrderedDict"],
        ["_target_=collections.OrderedDict made a OrderedDict", "no nn.Module"],
    ),
    "wrong keyword": (["+model.dropout=0.5"], ["dropout", "ddp_recipes.models.MLP", "Check the keys of model"]),
    "keyword of another data set": (
        ["data.train._target_=own_models.OneByOne"],
        ["data.train does not fit own_models.OneByOne", "'~data.train' +data.train._target_=own_models.OneByOne"],
    ),
    "learning rate of text": (["optimizer.lr=fast"], ["lr=fast", "torch.optim.SGD"]),
    "negative learning rate": (["optimizer.lr=-1"], ["lr=-1", "torch.optim.SGD"]),
    "number of samples of text": (["data=random", "data.num_samples=many"], ["data.train", "num_samples=many"]),
    "sync_batchnorm on CPU": (["strategy.sync_batchnorm=true"], ["sync_batchnorm=true", "GPUs only", "Leave it false"]),
    "hook that is not there": (["strategy.comm_hook=fp8"], ["comm_hook=fp8", "fp16", "powersgd"]),
    "metric that is not measured": (["checkpoint.monitor=val/acc"], ["val/acc", "Did you mean 'val/accuracy'?"]),
    "no last checkpoint": (["ckpt_path=last"], ["ckpt_path=last", "has no checkpoint"]),
    "no such checkpoint": (["ckpt_path=no.pt"], ["ckpt_path=no.pt", "last, best, auto"]),
    "model that cannot be split": (["model=linear", "model.num_devices=2"], ["num_devices=2", "into 1 stage(s)"]),
    "scheduler of no steps": (["scheduler=step", "scheduler.step_size=0"], ["scheduler.step_size=0", "at least 1"]),
    "groups of text": (["optimizer.groups=abc"], ["optimizer.groups=abc", "names, each with params"]),
    "loss of text": (["task.loss=abc"], ["task.loss=abc", "cannot be called"]),
    "metric of text": (["task.metrics.accuracy=abc"], ["task.metrics.accuracy=abc", "cannot be called"]),
    "metrics of text": (["task.metrics=abc"], ["task.metrics=abc", "names of metrics"]),
    "rate that is no number": (["optimizer.lr=nan"], ["optimizer.lr=nan would make all weights NaN"]),
    "number for an optimizer's switch": (["optimizer.nesterov=1e308"], ["optimizer.nesterov=1e+308", "true, false"]),
    "checkpoint of 300 letters": ([f"ckpt_path={'a' * 300}"], ["ckpt_path=aaa", "last, best, auto"]),
    "weights of 300 letters": ([f"weights_from={'a' * 300}"], ["weights_from=aaa", "a run directory"]),
    "number for a callback": (
        ["callbacks=lr_monitor", "callbacks.lr_monitor=-1"],
        ["callbacks.lr_monitor=-1", "give a _target_"],
    ),
    "target for a number": (
        ["data=random", "data.in_features={_target_: torch.nn.Linear}"],
        ["data.train.in_features", "missing 2 required positional arguments"],
    ),
    "logger's seconds of text": (["logger=csv", "logger.flush_secs=abc"], ["logger.flush_secs=abc", "a number"]),
    "huge number of samples": (
        ["data=random", "data.num_samples=9223372036854775808"],
        ["data.num_samples", "an integer of 65 bits", "64 bits"],
    ),
    "huge learning rate": ([f"optimizer.lr=1{'0' * 400}"], ["optimizer.lr", "1330 bits"]),
    "no time that a clock has": ([f"trainer.max_time='{'9' * 400}:00'"], ["trainer.max_time=9", "is no time"]),
    "validation all the time": (["trainer.val_check_interval=0"], ["trainer.val_check_interval=0", "at least 1"]),
    "logger's switch from an environment that has it not": (
        ["logger=csv", "+logger._partial_='${oc.env:NO_SUCH}'"],
        ["logger._partial_", "NO_SUCH"],
    ),
    "weights of no sample": (["data.weights=[]"], ["data.weights=[]", "one for each of"]),
    "size beyond memory": (
        ["data=random", "data.num_samples=9223372036854775807"],
        ["num_samples=9223372036854775807", "overflowed"],
    ),
    "metric for early stopping that is not measured": (
        ["callbacks=early_stopping", "callbacks.early_stopping.monitor=val/acc", "trainer.max_epochs=1"],
        ["callbacks.early_stopping.monitor=val/acc", "Did you mean 'val/accuracy'?"],
    ),
    "values as targets of a classification": (
        ["data=csv", "data.path=t.csv", "data.inputs=[wide]", "data.target=value"],
        ["CrossEntropyLoss takes classes", "task=regression"],
    ),
    "test without a test set": (["mode=test"], ["mode=test", "data.test"]),
}


@pytest.fixture(scope="module")
def first_run(tmp_path_factory: pytest.TempPathFactory, python: str) -> Path:
    """Return the directory of a finished run."""
    folder = tmp_path_factory.mktemp("first")
    ended = ran(folder, *SHORT, f"hydra.run.dir={folder / 'run'}", command=[python])
    assert ended.status == 0, ended.err
    return folder / "run"


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder, which this process is in as if it had been started there."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    return folder


def refused(
    python: str, folder: Path, *overrides: str, parts: list[str], environ: dict[str, str] | None = None
) -> Ended:
    """Run, and see that the request is refused in the way that the contract says."""
    before = files_in(folder)
    ended = ran(folder, *overrides, command=[python], environ=environ)
    assert ended.status == 2, ended
    assert ended.out == ""
    for part in parts:
        assert part in ended.err
    lines = ended.err.splitlines()
    assert parts[0] in lines[0]
    assert len(set(lines)) == len(lines) <= 3, "one message, not one for each rank, and no traceback"
    assert files_in(folder) == before
    return ended


def refused_here(folder: Path, *overrides: str, parts: list[str]) -> None:
    """See the same of a run in this very process."""
    before = files_in(folder)
    with pytest.raises(RequestError) as refusal:
        ddp_recipes.run([ONE, "launcher.device=cpu", *overrides])
    for part in parts:
        assert part in str(refusal.value)
    assert "frame #" not in str(refusal.value)  # of C++
    assert files_in(folder) == before


def files_in(folder: Path) -> dict[Path, bytes | None]:
    """Return every file with its content and every folder, but for what Python and :func:`ran` leave there."""
    return {
        path: path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
        if "__pycache__" not in path.parts and path.suffix not in (".out", ".err")
    }


@pytest.mark.spawn
@pytest.mark.parametrize("case", slow_but([*REFUSED_BEFORE_ANY_RANK][::5], REFUSED_BEFORE_ANY_RANK))
def test_a_wrong_request_is_refused_before_any_rank_starts(case: str, folder: Path, python: str) -> None:
    overrides, parts = REFUSED_BEFORE_ANY_RANK[case]
    refused(python, folder, *overrides, parts=parts)


@pytest.mark.parametrize("case", slow_but([*REFUSED_BY_A_RANK][::3], REFUSED_BY_A_RANK))
def test_what_only_a_rank_can_see_is_refused_alike(case: str, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    overrides, parts = REFUSED_BY_A_RANK[case]
    if not (here / "pipe").exists():
        os.mkfifo(here / "pipe")
    (here / "t.csv").write_text("wide,length,kind,value\n" + "1,2,0,0.5\n3,4,1,1.5\n" * 4)
    refused_here(here, *overrides, parts=parts)
    assert capfd.readouterr() == ("", "")


@pytest.mark.spawn
@pytest.mark.slow
@pytest.mark.parametrize("case", ["no MNIST", "unknown target", "negative learning rate", "no last checkpoint"])
def test_two_ranks_refuse_with_one_voice(case: str, folder: Path, python: str) -> None:
    overrides, parts = REFUSED_BY_A_RANK[case]
    refused(python, folder, TWO, *overrides, parts=parts)


@pytest.mark.spawn
@pytest.mark.slow
@pytest.mark.parametrize(
    ("level", "parts"),
    [
        ("DETAIL", ["TORCH_DISTRIBUTED_DEBUG=DETAIL", "over gloo by SIGSEGV", "INFO", "strategy=ddp_exact"]),
        ("foo", ["torch cannot be loaded", "TORCH_DISTRIBUTED_DEBUG must be OFF, INFO, or DETAIL"]),
    ],
)
def test_a_level_of_debugging_that_torch_crashes_of_is_refused(level: str, parts: list[str], folder: Path) -> None:
    environ = {"TORCH_DISTRIBUTED_DEBUG": level}  # read as torch is loaded, by a process of this run's own
    refused(sys.executable, folder, *SHORT, TWO, parts=parts, environ=environ)


@pytest.mark.spawn
@pytest.mark.slow
def test_a_number_of_threads_that_is_none_is_left_to_torch(folder: Path) -> None:
    ended = ran(folder, *SHORT, TWO, command=[sys.executable], environ={"OMP_NUM_THREADS": "0"})
    assert ended.status == 0, ended.err  # OpenMP says of it that it is none


@pytest.mark.spawn
def test_fewer_samples_than_replicas_are_refused(folder: Path, python: str) -> None:
    parts = ["data.global_batch_size=1", "2 replicas", "at least 2"]
    refused(python, folder, TWO, "data.global_batch_size=1", parts=parts)


@pytest.mark.spawn
@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data=mnist", "data.root=here"], "data.root=here: there is no MNIST"),
        (["-m", "seed=1,2", "hydra/launcher=devices"], "hydra/launcher=devices runs jobs in processes of its own"),
    ],
    ids=["data", "jobs without the ranks"],
)
def test_under_torchrun_rank_0_alone_says_why_it_was_refused(overrides: list[str], message: str, folder: Path) -> None:
    ended = ran(folder, *overrides, command=TORCHRUN)
    assert ended.status != 0
    assert ended.err.count(message) == 1
    assert not (folder / "outputs").exists()
    assert not (folder / "multirun").exists()


@pytest.mark.spawn
@pytest.mark.slow
def test_nodes_under_torchrun_are_refused_and_leave_no_folder(folder: Path) -> None:
    ended = ran(folder, "data=random", "model=toy", "launcher=nodes", command=TORCHRUN)
    assert ended.status != 0
    assert "and this process is one that torchrun started. Start train.py once on each node" in ended.err
    assert not (folder / "outputs").exists()


@pytest.mark.spawn
@pytest.mark.slow
@pytest.mark.nightly
def test_a_run_that_is_started_within_a_rank_of_several_nodes_is_on_one_node(folder: Path) -> None:
    outer = {"DDP_RECIPES_FIRST_RANKS": "0 4", "GROUP_RANK": "1"}  # whose own ranks' variables a user has unset
    ended = ran(folder, *SHORT, TWO, "hydra.run.dir=run", environ=outer)
    assert ended.status == 0, ended.err
    assert summary(folder / "run")["nnodes"] == 1


def test_the_checkpoint_of_another_model_is_refused_with_the_shapes_that_differ(here: Path, first_run: Path) -> None:
    refused_here(
        here,
        *SHORT,
        "model.hidden_features=7",
        f"ckpt_path={first_run}",
        parts=["a checkpoint of another model", "[10, 10] in the checkpoint, [7, 10] in the model", "config.yaml"],
    )


class Hostile:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("touch proof",)


@pytest.mark.parametrize("damage", ["one bit", "cut in half", "empty", "another", "hostile"])
def test_a_damaged_checkpoint_is_refused(damage: str, here: Path, first_run: Path) -> None:
    content = (first_run / "checkpoints" / "last.pt").read_bytes()
    state = torch.load(first_run / "checkpoints" / "last.pt", weights_only=True)
    weights = next(iter(state["model"].values())).numpy().tobytes()
    assert content.count(weights) == 1
    flipped = bytearray(content)
    flipped[content.index(weights)] ^= 1
    damaged = {
        "one bit": bytes(flipped),
        "cut in half": content[: len(content) // 2],
        "empty": b"",
        "another": b"hi",
        "hostile": pickle.dumps(Hostile()),
    }
    (here / "damaged.pt").write_bytes(damaged[damage])
    refused_here(
        here, *SHORT, "ckpt_path=damaged.pt", parts=["damaged.pt", "is damaged", "No complete checkpoint is in"]
    )


def test_the_directory_of_a_sweep_is_refused_with_its_runs(here: Path, first_run: Path) -> None:
    shutil.copytree(first_run, here / "sweep" / "0")
    (here / "sweep" / "1").mkdir()
    refused_here(here, *SHORT, "ckpt_path=sweep", parts=["ckpt_path=sweep holds several runs", "them: sweep/0."])


@pytest.mark.parametrize("key", ["ckpt_path", "weights_from"])
def test_an_empty_folder_is_refused_as_a_checkpoint(key: str, here: Path) -> None:
    (here / "empty").mkdir()
    refused_here(here, *SHORT, f"{key}={here}/empty", parts=[f"{key}={here}/empty is a folder without a checkpoint"])


@pytest.mark.spawn
@pytest.mark.parametrize("extra", [[], ["mode=validate"]], ids=["fit", "validate"])
def test_a_directory_that_holds_a_run_is_refused_and_left_as_it_is(
    extra: list[str], folder: Path, first_run: Path, python: str
) -> None:
    shutil.copytree(first_run, folder / "run")
    parts = ["already holds a run", "ckpt_path=auto", "hydra.run.dir"]
    refused(python, folder, *SHORT, *extra, f"hydra.run.dir={folder / 'run'}", parts=parts)


@pytest.mark.spawn
@pytest.mark.parametrize(
    ("environ", "parts"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, ["RANK, WORLD_SIZE but not LOCAL_RANK, MASTER_ADDR", "torchrun"]),
        ({"LOCAL_RANK": "0"}, ["LOCAL_RANK but not RANK", "unset"]),
        (
            {"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
            ["RANK=2 with WORLD_SIZE=2"],
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "two", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
            ["whole numbers", "two"],
        ),
        (
            {f"OMPI_COMM_WORLD_{name}": "x" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")},
            ["OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE", "whole numbers", "x"],
        ),
        (
            {f"OMPI_COMM_WORLD_{name}": "0" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")},
            ["RANK=0 with WORLD_SIZE=0"],
        ),
    ],
    ids=["half", "one", "beyond the size", "no number", "no number of MPI", "no rank of MPI"],
)
def test_rank_variables_that_make_no_rank_are_refused(
    environ: dict[str, str], parts: list[str], folder: Path, python: str
) -> None:
    refused(python, folder, environ=environ, parts=parts)


@pytest.mark.spawn
@pytest.mark.slow
def test_a_sweep_with_an_unknown_option_is_refused_and_writes_nothing(folder: Path, python: str) -> None:
    refused(python, folder, "-m", "model=mlp,mpl", parts=["model=mpl", "Did you mean 'mlp'?"])


def test_replicas_that_span_devices_follow_from_the_gpus_there_are() -> None:
    automatic = Request.of(make_job(["model=toy_mp"]).config)
    assert [automatic.processes(of_gpus(gpus)) for gpus in (2, 3, 4, 5, 8)] == [1, 1, 2, 2, 4]


@pytest.mark.parametrize(
    ("overrides", "gpus", "parts"),
    [
        ([TWO], 3, ["2 replicas of 2 device(s)", "3 visible GPU(s)", "1 fit(s)", "launcher.nproc_per_node=1"]),
        ([], 1, ["One replica of 2 device(s)", "1 visible GPU(s)", "0 fit(s)", "launcher.device=cpu"]),
        ([ONE], 1, ["1 replicas of 2 device(s)", "0 fit(s)", "on a machine with more GPUs"]),
        (["model=toy", "launcher.nproc_per_node=4"], 2, ["4 replicas of 1 device(s)", "2 fit(s)"]),
    ],
)
def test_more_devices_than_there_are_is_refused_with_how_many_replicas_fit(
    overrides: list[str], gpus: int, parts: list[str]
) -> None:
    request = Request.of(make_job(["model=toy_mp", *overrides]).config)
    with pytest.raises(RequestError) as refusal:
        request.processes(of_gpus(gpus))
    for part in parts:
        assert part in str(refusal.value)
