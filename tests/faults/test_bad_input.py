"""A wrong request ends with status 2 and one message: what was given, what is allowed, what to do. Nothing is written."""

import shutil
from pathlib import Path

import pytest

from ddp_recipes.errors import RequestError
from ddp_recipes.request import Request
from ddp_recipes.testing import make_job

from .processes import TORCHRUN, Ended, ran

ONE = "launcher.nproc_per_node=1"
TWO = "launcher.nproc_per_node=2"
SHORT = ("data=random", "data.num_samples=64", "data.val_samples=32", "model=toy", "trainer.max_epochs=1", ONE)

# Name of the case: (overrides, parts of the message).
REFUSED_BEFORE_ANY_RANK: dict[str, tuple[list[str], list[str]]] = {
    "unknown option": (["model=mpl"], ["model=mpl", "linear, mlp, resnet18", "Did you mean 'mlp'?"]),
    "unknown group": (["modle=mlp"], ["modle", "Did you mean 'model'?"]),
    "unknown key": (["sed=1"], ["sed", "Did you mean 'seed'?"]),
    "unknown key in a group": (["optimizer.lrr=1"], ["optimizer.lrr=1", "Did you mean 'optimizer.lr'?", "momentum"]),
    "added key that nothing reads": (["+trainer.max_epoch=3"], ["trainer.max_epoch", "Did you mean 'max_epochs'?"]),
    "text for a number": (["trainer.max_epochs=ten"], ["trainer.max_epochs=ten", "a whole number", "or null"]),
    "number for a switch": (["data.drop_last=3"], ["data.drop_last=3", "true, false"]),
    "value that is not among the allowed": (["mode=fitt"], ["mode=fitt", "validate", "Did you mean 'fit'?"]),
    "batch size of 0": (["data.batch_size=0"], ["data.batch_size=0", "at least 1"]),
    "learning rate without a number": (["trainer.max_time=soon"], ["trainer.max_time=soon", "DD:HH:MM:SS"]),
    "no limit": (["trainer.max_epochs=null"], ["trainer.max_epochs", "trainer.max_steps", "set one of them"]),
    "broken override": (["data.batch_size"], ["data.batch_size"]),
    "missing interpolation": (["model.in_features=${data.no_such}"], ["model.in_features", "data.no_such"]),
    "no GPU": (["launcher.device=cuda"], ["launcher.device=cuda", "no GPU is visible", "launcher.device=cpu"]),
    "NCCL without GPU": (["launcher.backend=nccl"], ["launcher.backend=nccl", "launcher.backend=gloo"]),
    "NCCL on CPU": (["launcher.backend=nccl", "launcher.device=cpu"], ["launcher.backend=nccl", "launcher.backend=gloo"]),
    "image model on a table": (["model=resnet18"], ["model.in_channels", "data.in_channels", "Choose another data"]),
    "two processes for single": (["strategy=single", TWO], ["nproc_per_node=2", "one process", "strategy=ddp"]),
    "several nodes for the local launcher": (["launcher.nnodes=2"], ["launcher.nnodes=2", "torchrun"]),
    "launcher=env without a rank": (["launcher=env"], ["launcher=env", "RANK", "torchrun"]),
    "no config folder": (["--config-dir", "nowhere"], ["--config-dir nowhere", "no folder"]),
    "csv without a path": (["data=csv", "data.inputs=[a]", "data.target=y", "data.out_features=2"], ["data.path"]),
}

REFUSED_BY_A_RANK: dict[str, tuple[list[str], list[str]]] = {
    "no MNIST": (["data=mnist", "data.root=here"], ["data.root=here", "MNIST/raw", "data.download=true"]),
    "no image folder": (
        ["data=image_folder", "data.root=here", "data.out_features=3", "model=resnet18"],
        ["data.root=here", "here/train", "Set data.root"],
    ),
    "no csv": (
        ["data=csv", "data.path=no.csv", "data.inputs=[a]", "data.target=y", "data.out_features=2"],
        ["data.path=no.csv"],
    ),
    "csv without the column": (
        ["data=csv", "data.path=t.csv", "data.inputs=[wide,long]", "data.target=kind", "data.out_features=2"],
        ["long", "width", "wide, length, kind"],
    ),
    "unknown target": (["model._target_=own_models.Nobody"], ["model._target_=own_models.Nobody"]),
    "target in no module": (["model._target_=no_such_module.Model"], ["no_such_module"]),
    "target that is no model": (["model._target_=builtins.dict"], ["builtins.dict", "nn.Module"]),
    "wrong keyword": (["+model.dropout=0.5"], ["dropout", "ddp_recipes.models.MLP", "Check the keys of model"]),
    "learning rate of text": (["optimizer.lr=fast"], ["optimizer", "fast"]),
    "negative learning rate": (["optimizer.lr=-1"], ["optimizer", "-1"]),
    "number of samples of text": (["data=random", "data.num_samples=many"], ["num_samples", "many"]),
    "sync_batchnorm on CPU": (["strategy.sync_batchnorm=true"], ["sync_batchnorm=true", "GPUs only", "Leave it false"]),
    "hook that is not there": (["strategy.comm_hook=fp8"], ["comm_hook=fp8", "fp16", "powersgd"]),
    "metric that is not measured": (["checkpoint.monitor=val/acc"], ["val/acc", "Did you mean 'val/accuracy'?"]),
    "no last checkpoint": (["ckpt_path=last"], ["ckpt_path=last", "has no checkpoint"]),
    "no such checkpoint": (["ckpt_path=no.pt"], ["ckpt_path=no.pt", "last, best, auto"]),
    "model that cannot be spread": (["model.num_devices=2"], ["num_devices=2", "toy_mp"]),
    "test without a test set": (["mode=test"], ["mode=test", "data.test"]),
    "fewer samples than replicas": (["data.global_batch_size=1", TWO], ["data.global_batch_size=1", "at least 2"]),
}


@pytest.fixture(scope="module")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a finished run."""
    folder = tmp_path_factory.mktemp("first")
    ended = ran(folder, *SHORT, f"hydra.run.dir={folder / 'run'}")
    assert ended.status == 0, ended.err
    return folder / "run"


def refused(folder: Path, *overrides: str, parts: list[str], environ: dict[str, str] | None = None) -> Ended:
    """Run, and see that the request is refused in the way that the contract says."""
    before = files_in(folder)
    ended = ran(folder, *overrides, environ=environ)
    assert ended.status == 2, ended
    assert ended.out == ""
    for part in parts:
        assert part in ended.err
    assert "Traceback" not in ended.err
    assert "frame #" not in ended.err, "C++ stack frames"
    assert "Warning" not in ended.err
    first = ended.err.splitlines()[0]
    assert ended.err.count(first) == 1, "one message, not one for each rank"
    assert {path: text for path, text in files_in(folder).items() if path.suffix not in (".out", ".err")} == before
    return ended


def files_in(folder: Path) -> dict[Path, bytes | None]:
    """Return every file with its content and every folder."""
    return {
        path: path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
        if "__pycache__" not in path.parts
    }


@pytest.mark.spawn
@pytest.mark.parametrize("case", REFUSED_BEFORE_ANY_RANK)
def test_a_wrong_request_is_refused_before_any_rank_starts(case: str, folder: Path) -> None:
    overrides, parts = REFUSED_BEFORE_ANY_RANK[case]
    refused(folder, *overrides, parts=parts)


@pytest.mark.spawn
@pytest.mark.parametrize("case", REFUSED_BY_A_RANK)
def test_what_only_a_rank_can_see_is_refused_in_one_message(case: str, folder: Path) -> None:
    overrides, parts = REFUSED_BY_A_RANK[case]
    (folder / "t.csv").write_text("wide,length,kind\n1,2,0\n3,4,1\n" * 4)
    refused(folder, ONE, *overrides, parts=parts)


@pytest.mark.spawn
@pytest.mark.slow
@pytest.mark.parametrize("case", ["no MNIST", "unknown target", "wrong keyword", "metric that is not measured"])
def test_two_ranks_refuse_with_one_voice(case: str, folder: Path) -> None:
    overrides, parts = REFUSED_BY_A_RANK[case]
    refused(folder, TWO, *overrides, parts=parts)


@pytest.mark.spawn
@pytest.mark.slow
def test_under_torchrun_rank_0_alone_says_why_it_was_refused(folder: Path) -> None:
    ended = ran(folder, "data=mnist", "data.root=here", command=TORCHRUN)
    assert ended.status != 0
    assert ended.err.count("data.root=here: there is no MNIST") == 1
    assert not (folder / "outputs").exists()


@pytest.mark.spawn
def test_the_checkpoint_of_another_model_is_refused_with_the_shapes_that_differ(folder: Path, first_run: Path) -> None:
    refused(
        folder,
        *SHORT,
        "model.hidden_features=7",
        f"ckpt_path={first_run}",
        parts=["a checkpoint of another model", "[10, 10] in the checkpoint, [7, 10] in the model", "config.yaml"],
    )


@pytest.mark.spawn
@pytest.mark.parametrize("damage", ["one byte", "half of it", "all of it", "not a checkpoint"])
def test_a_damaged_checkpoint_is_refused(damage: str, folder: Path, first_run: Path) -> None:
    content = bytearray((first_run / "checkpoints" / "last.pt").read_bytes())
    content[len(content) // 2] ^= 1
    damaged = {
        "one byte": bytes(content),
        "half of it": bytes(content[: len(content) // 2]),
        "all of it": b"",
        "not a checkpoint": b"hello",
    }
    (folder / "damaged.pt").write_bytes(damaged[damage])
    refused(folder, *SHORT, "ckpt_path=damaged.pt", parts=["damaged.pt", "damaged"])


@pytest.mark.spawn
@pytest.mark.parametrize("extra", [[], ["mode=validate"], [TWO]], ids=["fit", "validate", "two ranks"])
def test_a_directory_that_holds_a_run_is_refused_and_left_as_it_is(
    extra: list[str], folder: Path, first_run: Path
) -> None:
    shutil.copytree(first_run, folder / "run")
    parts = ["already holds a run", "ckpt_path=auto", "hydra.run.dir"]
    refused(folder, *SHORT, *extra, f"hydra.run.dir={folder / 'run'}", parts=parts)


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
    ],
    ids=["half", "one", "beyond the size", "no number"],
)
def test_rank_variables_that_make_no_rank_are_refused(
    environ: dict[str, str], parts: list[str], folder: Path
) -> None:
    refused(folder, environ=environ, parts=parts)


@pytest.mark.spawn
def test_a_sweep_with_an_unknown_option_is_refused_and_writes_nothing(folder: Path) -> None:
    refused(folder, "-m", "model=mlp,mpl", parts=["model=mpl", "Did you mean 'mlp'?"])


def test_replicas_that_span_devices_follow_from_the_gpus_there_are() -> None:
    automatic = Request.of(make_job(["model=toy_mp"]).config)
    assert [automatic.processes(gpus) for gpus in (2, 3, 4, 5, 8)] == [1, 1, 2, 2, 4]


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
        request.processes(gpus)
    for part in parts:
        assert part in str(refusal.value)
