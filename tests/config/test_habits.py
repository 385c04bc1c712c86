"""What users of Hydra are used to does here what it does there, or is refused in one message that says why."""

import itertools
import json
import os
import runpy
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import hydra
import pytest
import yaml
from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf

import ddp_recipes
from ddp_recipes.controller import make_directory
from ddp_recipes.errors import RequestError
from helpers.marks import quick_each
from helpers.patience import patience
from helpers.processes import TORCHRUN

TINY = ["data=random", "data.num_samples=64", "data.batch_size=16", "data.val_samples=16", "model=toy", "logger=none"]
QUICK = [*TINY, "launcher.device=cpu", "strategy=single", "trainer.progress=false", "trainer.max_epochs=1"]

NEWER = not hydra.__version__.startswith("1.3")  # whose errors are worded otherwise
BASE: dict[str, str] = {} if NEWER else {"version_base": "1.3"}  # 1.4 warns of it
NULL = "hydra.sweeper.params is null, and Hydra puts no keys into it."


def message_of(*overrides: str, **options: Any) -> str:
    """Return the message that refuses these overrides."""
    with pytest.raises(RequestError) as raised:
        ddp_recipes.run(["strategy=single", *overrides], **options)
    return str(raised.value)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to run in, which a refused request leaves empty."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


# --- overrides -------------------------------------------------------------------------------------------------------


EXPLAINED = [
    ("hydra.job.num=abc", "hydra.job.num=abc: Value 'abc' of type 'str' could not be converted to Integer."),
    ("hydra.mode='${seed}'", "hydra.mode: While dereferencing interpolation '${seed}': Invalid value '42'"),
    ("hydra.runtime='${no_such}'", "hydra.runtime: Interpolation key 'no_such' not found"),
    ("hydra.job.env_set='${seed}'", " is no section. Allowed: variables, with their values."),
    ("++checkpoint={1: 2}", "checkpoint.1 is not a key."),
    ("launcher.timeout_s='${oc.env:NO_SUCH}'", "launcher.timeout_s=${oc.env:NO_SUCH} is not allowed."),
    ("hydra.run.dri=x", "hydra.run.dri=x: there is no key hydra.run.dri. Did you mean 'hydra.run.dir'?"),
    ("model=[", "model=[: Hydra cannot read this override (no viable alternative at input '['). It reads key=value"),
    ("seed", "seed: Hydra cannot read this override (missing EQUAL at"),
    ("seed = 3", "seed = 3: there are spaces around the equals sign. Write seed=3."),
    ("experiment=null", "For none of them: '~experiment'."),
    ("+model._args_=[1]", "MLP.__init__() got multiple values for argument 'in_features'. Check the keys of model."),
    ("=3", "=3: there is no key before the equals sign. Write key=value."),
    ("train", " Did you mean 'mode=fit'?"),
    ("repot", " Commands: index, init, pack, report. Did you mean 'report'?"),
    ("optimizer=5", "optimizer=5: there is no such option. Options of optimizer: "),
    ("+optimizer.lr=5", "optimizer.lr is there already, so there is nothing to add. Write optimizer.lr=5."),
    ("+optimizer=adam", "optimizer is there already, so there is nothing to add. Write optimizer=adam."),
    ("~optimizer.lrr", "~optimizer.lrr: there is no key optimizer.lrr. Did you mean 'optimizer.lr'?"),
    ("~model", "model has no _target_, the dotted name of a class or function to call."),
    (
        "model={hidden_feature: 3}",
        "model={hidden_feature: 3}: there is no key model.hidden_feature. Did you mean 'model.hidden_features'?",
    ),
    ("model={more: 3}", "To add a key that the yaml does not have, write +model.more=…."),
    ("seedy=1", "seedy=1: there is no key seedy. Did you mean 'seed'?"),
    (
        "hydra.callbacks.own=1",
        "hydra.callbacks.own=1: there is no key hydra.callbacks.own. Did you mean 'callbacks'? To add a key that "
        "the yaml does not have, write +hydra.callbacks.own=1.",
    ),
    ("data.batch_size=${batch}", "data.batch_size follows batch, and there is no key batch."),
    (
        "--config-name=trian",
        "--config-name trian: there is none. There are: train. Did you mean 'train'?",
    ),
    ("--experimental-rerun=x", "ddp_recipes.run(OmegaConf.load("),
    (
        "hydra.sweeper.params={seed: 1}",
        f"params={{seed: 1}}: {'there is no key hydra.sweeper.params.seed.' if NEWER else NULL}",
    ),
    (
        "hydra.sweeper.params.seed=1",
        "params.seed=1: " + ("Cannot set 'hydra.sweeper.params.seed' because" if NEWER else NULL),
    ),
    ("++trianer.max_epochs=3", "++trianer.max_epochs=3: there is no key trianer, and nothing refers to it"),
    ("+scheduler@warmup=cosine", "+scheduler@warmup=cosine: there is no key warmup, and nothing refers to it"),
    ("--resolve", "--resolve is about what --cfg shows, and there is no --cfg, as in --cfg job --resolve."),
    ("--package=model", "--package is about what --cfg shows"),
    ("hydra.run.dir=/dev/null/x", "/dev/null/x cannot be the run directory: Not a directory."),
]


@pytest.mark.parametrize(
    ("override", "message"),
    quick_each(4, EXPLAINED),
)
def test_an_override_that_hydra_refuses_is_explained(override: str, message: str, here: Path) -> None:
    assert message in message_of(override)
    assert not list(here.iterdir())


@pytest.mark.parametrize(("name", "times", "reason"), [("x", 256, "File name too long"), ("x/", 2000, "may have 3840")])
def test_a_run_directory_whose_path_is_too_long_is_refused(name: str, times: int, reason: str, here: Path) -> None:
    assert reason in message_of(f"hydra.run.dir={name * times}")
    assert not list(here.iterdir())


def test_a_choice_that_is_added_to_that_of_a_primary_config_is_explained(here: Path) -> None:
    (here / "conf").mkdir()
    (here / "conf" / "own.yaml").write_text("defaults:\n  - train\n  - override optimizer: adam\n  - _self_\n")
    with pytest.raises(RequestError, match=r"^\+optimizer=sgd: optimizer is there already, .* Write optimizer=sgd\.$"):
        ddp_recipes.run(["--config-dir", "conf", "--config-name", "own", "+optimizer=sgd"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("_target_: A\nnames: [a, b\nc: 3\n", "own.yaml, line 3, column 2: "),
        ("_target_: A\n\tb: 3\n", "own.yaml, line 2, column 1: found "),
        ("_target_: A\n_target_: B\n", "own.yaml, line 2, column 1: found duplicate key _target_"),
        ("in_features: 3\n", "model has no _target_"),
        ("defaults: [nothing]\n", "model=nothing: there is no such option."),
        (
            "defaults: [override /optimizer: adam]\n",
            "In 'model/own': Invalid Defaults List override '/optimizer: adam'"
            if NEWER
            else "model/own.yaml overrides optimizer, which Hydra allows for",
        ),
    ],
)
def test_a_yaml_that_is_wrong_is_named(text: str, message: str, here: Path) -> None:
    write(here / "conf" / "model" / "own.yaml", text)
    assert message in message_of("--config-dir", "conf", "model=own")


def test_a_section_of_a_yaml_that_is_written_almost_like_ours_is_refused(here: Path) -> None:
    write(here / "conf" / "own.yaml", "defaults: [train, _self_]\ncallback: {ema: {decay: 0.9}}\n")
    refused = "callback: there is no key callback, and nothing refers to it, so it would do nothing. Did you mean"
    assert refused in message_of("--config-dir", "conf", "--config-name", "own")


def test_a_group_of_ones_own_may_be_added_and_what_a_resolver_reads(here: Path) -> None:
    write(here / "conf" / "variant" / "short.yaml", "# @package _global_\ntrainer: {max_steps: 1}\n")
    write(here / "conf" / "paths" / "own.yaml", "root: here\n")
    added = ["+variant=short", "+paths=own", "+width=3", "model.hidden_features=${oc.select:width,5}"]
    summary = ddp_recipes.run(["--config-dir", "conf", *QUICK, *added])
    assert summary["global_step"] == 1
    jobs = ddp_recipes.run(["--config-dir", "conf", *QUICK, "-m", "+variant=glob(*)", "+width=1,2", *added[3:]])
    assert [job["global_step"] for job in jobs] == [1, 1]


def test_a_name_that_a_sweeper_of_a_yaml_is_to_change_is_looked_up_there(here: Path) -> None:
    params = "# @package _global_\nhydra: {sweeper: {params: {optimizer.l: 'choice(0.1,0.2)'}}}\n"
    write(here / "conf" / "experiment" / "own.yaml", params)
    said = message_of("-m", "--config-dir", "conf", "experiment=own")
    assert said.startswith(
        "hydra.sweeper.params: optimizer.l: there is no key optimizer.l. Did you mean 'optimizer.lr'?"
    )


@pytest.mark.slow
def test_a_key_whose_value_is_null_can_be_deleted(capsys: pytest.CaptureFixture[str]) -> None:
    ddp_recipes.run(["~optimizer.fused", "~data.test=null", "--cfg", "job"])
    config = OmegaConf.create(capsys.readouterr().out)
    assert isinstance(config, DictConfig)
    assert "fused" not in config.optimizer
    assert "lr" in config.optimizer
    assert "test" not in config.data
    assert ddp_recipes.run([*QUICK, "~optimizer.fused"])["status"] == "finished"


def test_what_is_deleted_may_be_added_anew(capsys: pytest.CaptureFixture[str]) -> None:
    ddp_recipes.run(["~model", "+model._target_=ddp_recipes.models.MLP", "+model.in_features=64", "--cfg", "job"])
    config = OmegaConf.create(capsys.readouterr().out)
    assert isinstance(config, DictConfig)
    assert (config.model._target_, config.model.in_features) == ("ddp_recipes.models.MLP", 64)
    assert "hidden_features" not in config.model


# --- flags -----------------------------------------------------------------------------------------------------------


def test_version_is_ours_and_torch_s(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        ddp_recipes.run(["--version"])
    assert exited.value.code == 0
    assert capsys.readouterr().out.startswith(f"ddp_recipes {ddp_recipes.__version__}, torch ")


@pytest.mark.slow
def test_config_dir_wins_for_groups_primary_configs_and_questions(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(here / "conf" / "optimizer" / "sgd.yaml", "# own\n_target_: torch.optim.SGD\n_partial_: true\nlr: 7.0\n")
    write(here / "conf" / "model" / "mine.yaml", "_target_: torch.nn.Identity\n")
    write(here / "conf" / "own.yaml", "defaults: [train, _self_]\nseed: 11\n")
    ddp_recipes.run(["--config-dir", "conf", "--config-name", "own", "--cfg", "job"])
    config: Any = OmegaConf.create(capsys.readouterr().out)
    assert (config.seed, config.optimizer.lr) == (11, 7.0)
    write(here / "conf" / "train.yaml", "defaults: [optimizer: sgd, model: mine, _self_]\nseed: 13\n")
    ddp_recipes.run(["--config-dir", "conf", "--cfg", "job"])
    assert OmegaConf.create(capsys.readouterr().out).seed == 13
    with pytest.raises(RequestError, match="The config has no section data"):
        ddp_recipes.run(["--config-dir", "conf"])
    ddp_recipes.run(["--config-dir", "conf", "--help"])
    assert "mine" in capsys.readouterr().out

    def completed(line: str) -> list[str]:
        monkeypatch.setenv("COMP_LINE", line)
        ddp_recipes.run(["-sc", "query=bash"])
        return capsys.readouterr().out.split()

    assert completed("ddp-recipes --config-dir conf model=m") == ["model=mine", "model=mlp"]
    assert completed("ddp-recipes model=m") == ["model=mlp"]
    assert "model=mine" in completed("python train.py -cd conf seed=1 model=")
    with pytest.raises(RequestError, match="No completion plugin for 'cmd'"):
        ddp_recipes.run(["-sc", "install=cmd"])


# --- a config that is composed already -------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_composed_config_runs_as_it_is(here: Path) -> None:
    with initialize_config_module("ddp_recipes.conf", **BASE):
        config = compose("train", [*QUICK, "seed=5"])
    before = OmegaConf.to_yaml(config)
    summary = ddp_recipes.run(config)
    assert OmegaConf.to_yaml(config) == before
    again = ddp_recipes.run(config)
    assert summary["weights_sha256"] == again["weights_sha256"]
    assert summary["run_directory"] != again["run_directory"], "both began in the same second, or nearly"
    assert summary["weights_sha256"] == ddp_recipes.run([*QUICK, "seed=5"])["weights_sha256"]
    assert Path(summary["run_directory"]).parents[1] == here / "outputs"
    # What a run recorded runs again, in a directory that is given.
    recorded = OmegaConf.load(Path(summary["run_directory"], "config.yaml"))
    assert isinstance(recorded, DictConfig)
    third = ddp_recipes.run(OmegaConf.to_container(recorded), directory="third")  # type: ignore[arg-type]
    assert (third["weights_sha256"], third["run_directory"]) == (summary["weights_sha256"], str(here / "third"))
    with pytest.raises(RequestError, match="already holds a run"):
        ddp_recipes.run(recorded, directory="third")


def test_a_composed_config_is_checked() -> None:
    with initialize_config_module("ddp_recipes.conf", **BASE):
        config = compose("train", ["data.batch_size=0"])
    with pytest.raises(RequestError, match=r"data\.batch_size=0 is not allowed"):
        ddp_recipes.run(config)
    with pytest.raises(RequestError, match="The config has no section data"):
        ddp_recipes.run({"seed": 3})
    with pytest.raises(RequestError, match=r"takes a list of overrides, or a config: run\(\['model=toy'\]\)"):
        ddp_recipes.run("model=toy")
    for given in (None, ["seed=3", 3]):
        with pytest.raises(RequestError, match="takes a list of overrides, or a config"):
            ddp_recipes.run(given)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="directory= is for a composed config"):
        ddp_recipes.run([], directory="here")


def test_a_sweep_over_what_matches_nothing_is_refused(here: Path) -> None:
    with pytest.raises(RequestError, match=r"^The sweep has no job: model=glob\(zz\*\) comes to no value"):
        ddp_recipes.run(["-m", *QUICK, "model=glob(zz*)"])
    assert not list(here.iterdir())


def test_a_script_that_runs_where_a_run_imports_it_is_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(here)
    own = ["~model", "+model._target_=unguarded.Net", "strategy=single", *QUICK[:-3]]
    text = f"import torch\nimport ddp_recipes\nclass Net(torch.nn.Linear): pass\nddp_recipes.run({own!r})\n"
    write(here / "unguarded.py", text)
    with pytest.raises(RequestError, match=r"^model\._target_=unguarded\.Net cannot be .*Put that call under if __na"):
        runpy.run_path("unguarded.py", run_name="__main__")
    assert not (here / "outputs").exists()


SECOND = """
from pathlib import Path
from threading import Thread

import ddp_recipes


class Second(ddp_recipes.Callback):
    def __init__(self):
        thread = Thread(target=self.start)
        thread.start()
        thread.join()

    def start(self):
        try:
            ddp_recipes.run(["strategy=single"])
        except ddp_recipes.RequestError as error:
            Path("refused.txt").write_text(str(error))
"""


def test_a_run_beside_one_in_another_thread_is_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both went into one directory: Hydra keeps a job's config for the whole process."""
    monkeypatch.syspath_prepend(here)
    write(here / "beside.py", SECOND)
    assert ddp_recipes.run([*QUICK, "+callbacks.second._target_=beside.Second"])["status"] == "finished"
    assert "has a run that is still going" in (here / "refused.txt").read_text()


def test_a_folder_that_is_no_longer_there_is_named(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "gone").mkdir()
    monkeypatch.chdir(here / "gone")
    (here / "gone").rmdir()
    with pytest.raises(RequestError, match="current folder has been removed"):
        ddp_recipes.run(QUICK)
    monkeypatch.chdir(here)
    (here / "run").symlink_to("nowhere/run")
    assert f"{here / 'run'} is a symbolic link to nowhere/run, which is not there" in message_of("hydra.run.dir=run")


APPLICATION = """\
import hydra
import ddp_recipes

@hydra.main(version_base="1.3", config_path="conf", config_name="app")
def main(config):
    return ddp_recipes.run(config)["metrics"]["val/loss"] * config.mine

if __name__ == "__main__":
    main()
"""


SEEDED = """\
import ddp_recipes.datasets

def seeded(seed, **sizes):
    return ddp_recipes.datasets.random_regression(seed=seed + 1, **sizes)
"""


@pytest.mark.slow
def test_numbers_of_the_environment_reach_what_takes_numbers(here: Path, python: str) -> None:
    numbers = ["seed=${oc.env:TASK}", "optimizer.lr=${oc.env:RATE}", "data.num_samples=${oc.env:SAMPLES}"]
    command = [python, "-m", "ddp_recipes", *QUICK, "logger=tensorboard", *numbers, "hydra.run.dir='a run/1'"]
    given = {**os.environ, "TASK": "3", "RATE": "0.25", "SAMPLES": "32"}  # as of a job array
    done = subprocess.run(command, cwd=here, env=given, capture_output=True, text=True, timeout=patience(120))
    assert done.returncode == 0, done.stderr
    config = yaml.safe_load((here / "a run" / "1" / "config.yaml").read_text())
    assert (config["seed"], config["optimizer"]["lr"]) == (3, "${oc.env:RATE}")
    summary = json.loads((here / "a run" / "1" / "summary.json").read_text())
    assert summary["metrics"]["train/lr"] == 0.25
    assert "tensorboard --logdir 'a run/1'" in done.stdout


def test_what_follows_a_number_of_the_environment_is_that_number(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TASK", "3")
    monkeypatch.syspath_prepend(here)
    write(here / "own_seeded.py", SEEDED)
    data = ["data.train._target_=own_seeded.seeded", "data.val._target_=own_seeded.seeded"]
    assert ddp_recipes.run([*QUICK, "seed=${oc.env:TASK}", *data])["status"] == "finished"


@pytest.mark.slow
def test_an_application_s_own_main_runs_in_its_own_directories(here: Path, python: str) -> None:
    write(here / "app.py", APPLICATION)
    write(here / "conf" / "app.yaml", "defaults: [train, _self_]\nmine: 3\n")
    sweep = ["-m", *QUICK[:-3], "hydra.sweep.dir=sweep", "launcher.nproc_per_node=2", "seed=1,2"]
    done = subprocess.run([python, "app.py", *sweep], cwd=here, capture_output=True, text=True, timeout=patience(120))
    assert done.returncode == 0, done.stderr
    for job in "01":
        summary = json.loads((here / "sweep" / job / "summary.json").read_text())
        assert (summary["status"], summary["world_size"]) == ("finished", 2)
        assert f"seed={int(job) + 1}" in summary["overrides"]
        record = {path.name for path in (here / "sweep" / job / ".hydra").iterdir()}
        assert record == {"config.yaml", "hydra.yaml", "overrides.yaml"}
    assert not (here / "outputs").exists()


@pytest.mark.slow
@pytest.mark.spawn
def test_a_second_run_under_torchrun_is_refused(here: Path, python: str) -> None:
    write(here / "twice.py", f"import ddp_recipes\nfor _ in range(2):\n    ddp_recipes.run({QUICK[:-3]!r})\n")
    command = [python, *TORCHRUN, "twice.py"]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=patience(120))
    assert done.returncode == 1
    assert "RequestError: This is a second run in one of 2 processes that were started together" in done.stderr
    assert len(list((here / "outputs").glob("*/*/summary.json"))) == 1


# --- directories -----------------------------------------------------------------------------------------------------


def test_a_default_directory_that_is_taken_gets_a_number(here: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        every = list(pool.map(make_directory, itertools.repeat(here / "outputs" / "now", 24), itertools.repeat(True)))
    made = [directory for directory, *_ in every]
    assert len(set(made)) == 24
    assert {path.name for path in made} == {"now", *(f"now_{number}" for number in range(1, 24))}
    assert make_directory(here / "outputs" / "now", fresh=False) == [here / "outputs" / "now"]


@pytest.mark.slow
def test_runs_of_one_second_get_directories_of_their_own(here: Path) -> None:
    by_minute = "hydra.run.dir=outputs/${now:%Y}"
    first, second = (ddp_recipes.run([*QUICK, by_minute])["run_directory"] for _ in range(2))
    assert second == f"{first}_1"
    ddp_recipes.run([*QUICK, "hydra.run.dir=mine"])
    assert "already holds a run" in message_of(*QUICK, "hydra.run.dir=mine")
    sweep = ["-m", *QUICK, "hydra.sweep.dir=multirun/${now:%Y}", "seed=1"]
    for _ in range(2):
        assert ddp_recipes.run(sweep)[0]["status"] == "finished"
    assert len(list((here / "multirun").iterdir())) == 2


# --- notebooks and scripts -------------------------------------------------------------------------------------------

SCRIPT = f"""\
import threading
import torch
import ddp_recipes

SCALE, LOCK = 2.0, threading.Lock()

class Net(torch.nn.Linear):
    def forward(self, inputs):
        return SCALE * super().forward(inputs)

class Points(torch.utils.data.Dataset):
    def __init__(self, num_samples, in_features, out_features, **others):
        self.sizes = num_samples, in_features, out_features
    def __len__(self):
        return self.sizes[0]
    def __getitem__(self, index):
        return torch.full([self.sizes[1]], 1.0), torch.full([self.sizes[2]], 1.0)

class Locked(Net):
    def forward(self, inputs):
        with LOCK:
            return super().forward(inputs)

quick = {[*QUICK[:-3], "trainer.progress=false", "trainer.max_epochs=1", "model=linear"]!r}
own = [*quick, "model._target_=__main__.Net", "data.train._target_=__main__.Points"]
for more in (["strategy=single"], ["strategy=ddp_exact", "launcher.start_method=spawn"], ["strategy=ddp_exact"]):
    summary = ddp_recipes.run([*own, *more])
    print(summary["world_size"], summary["status"])
ddp_recipes.run([*quick, "model._target_=__main__.Locked", "strategy=single"])
try:
    ddp_recipes.run([*quick, "model._target_=__main__.Locked"])
except ddp_recipes.RequestError as error:
    print(*error._render_traceback_())
"""


@pytest.mark.slow
@pytest.mark.spawn
def test_classes_of_a_script_reach_other_processes(here: Path, python: str) -> None:
    write(here / "script.py", SCRIPT)
    done = subprocess.run([python, "script.py"], cwd=here, capture_output=True, text=True, timeout=patience(120))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.endswith(" finished")] == ["1 finished", "2 finished", "2 finished"]
    assert lines[-1].startswith("RequestError: __main__.Locked cannot be sent to the other processes (cannot pickle")
    assert "%%writefile my_model.py" in lines[-1]
    assert len(list((here / "outputs").glob("*/*"))) == 4, (
        "each has a directory, and nothing is left of the refused one"
    )
