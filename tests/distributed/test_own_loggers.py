"""Loggers of runs: one or several, ours or one's own, written by rank 0, each step once."""

import csv
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ddp_recipes.reporting.run_directory import Summary
from helpers.marks import quick_each, slow_but
from helpers.patience import patience

Run = Callable[..., Summary]

EACH_STEP = ["trainer.log_every_n_steps=1", "data.global_batch_size=8"]

MODULE = """
import os
from pathlib import Path

from ddp_recipes import Logger


class LinesLogger(Logger):
    def __init__(self, directory, purge_step=None, prefix=""):
        self.path, self.prefix = Path(directory) / "lines.txt", prefix
        self.path.parent.mkdir()

    def scalars(self, values, step):
        with self.path.open("a") as file:
            print(self.prefix, os.environ.get("RANK", 0), step, file=file)

    def see_with(self, run_directory):
        return f"cat {run_directory}/lines/lines.txt"
"""
YAML = "_target_: own_loggers_module.LinesLogger\nprefix: line\n"
SEVERAL = "defaults:\n  - csv@table\n  - lines@lines\n"
EXPERIMENT = "# @package _global_\ndefaults:\n  - override /logger: {}\n"


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder with a logger of one's own, and groups in ``conf``."""
    folder = tmp_path / "own"
    files = {
        "own_loggers_module.py": MODULE,
        "conf/logger/lines.yaml": YAML,
        "conf/logger/several.yaml": SEVERAL,
        "conf/experiment/table.yaml": EXPERIMENT.format("csv"),
        "conf/experiment/several.yaml": EXPERIMENT.format("several"),
        "conf/experiment/merged.yaml": EXPERIMENT.format("[csv, tensorboard]"),
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def command(python: str, own: Path, *overrides: str) -> "subprocess.CompletedProcess[str]":
    """Run the command line in a folder, with what is there."""
    quick = ["data=random", "data.num_samples=16", "model=toy", "trainer.max_epochs=1", "launcher.device=cpu"]
    line = [python, "-m", "ddp_recipes", "--config-dir", "conf", *quick, "hydra.run.dir=run", *overrides]
    return subprocess.run(line, cwd=own, capture_output=True, text=True, timeout=patience(120))


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "csv" / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def steps_of(folder: Path, name: str) -> list[int]:
    return [int(row["step"]) for row in table(folder) if row[name]]


def folders_of(run: Path) -> set[str]:
    return {path.name for path in run.iterdir() if path.is_dir()} - {"checkpoints", ".hydra"}


@pytest.mark.parametrize("world_size", [1, 2])
def test_several_loggers_are_written_by_rank_0_alone(world_size: int, run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run("logger=[tensorboard,csv]", *EACH_STEP, directory=folder, world_size=world_size)
    assert folders_of(folder) == {"tensorboard", "csv"}
    assert len(list((folder / "tensorboard").iterdir())) == 1
    assert {path.name for path in (folder / "csv").iterdir()} == {"metrics.csv", "hparams.yaml"}
    assert [int(row["step"]) for row in table(folder)] == list(range(1, 17))
    assert steps_of(folder, "train/loss") == list(range(1, 17))
    assert steps_of(folder, "val/loss") == [8, 16]


@pytest.mark.slow
def test_csv_has_each_step_once_after_a_resume(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    overrides = ["logger=csv", *EACH_STEP, "checkpoint.every_n_steps=5", "checkpoint.save_top_k=-1"]
    run(*overrides, directory=folder, world_size=2)
    whole = table(folder)
    run(*overrides, f"ckpt_path={folder / 'checkpoints' / 'step_00000005.pt'}", directory=folder, world_size=2)
    run(*overrides, "ckpt_path=auto", directory=folder, world_size=2)  # with nothing left to do
    resumed = table(folder)
    for row in (*whole, *resumed):
        del row["train/samples_per_second"]
    assert resumed == whole
    assert len(whole) == 16


@pytest.mark.parametrize("where", slow_but(["validated"], ["step", "validation", "validated", "saved"]))
def test_csv_has_each_step_once_after_a_kill(where: str, run: Run, tmp_path: Path) -> None:
    overrides = ["logger=csv", *EACH_STEP, "checkpoint.every_n_steps=3", "ckpt_path=auto"]
    step = 9 if where == "saved" else 8
    kill = f"+callbacks.killed={{_target_: own_parts.Signalled, where: {where}, step: {step}, rank: 0}}"
    folder = tmp_path / "killed"
    with pytest.raises(RuntimeError):
        run(*overrides, kill, "logger.flush_secs=0", directory=folder)
    assert table(folder), "what the kill left can be read"
    run(*overrides, directory=folder)
    run(*overrides, directory=tmp_path / "whole")
    killed, whole = table(folder), table(tmp_path / "whole")
    for row in (*killed, *whole):
        del row["train/samples_per_second"]
    assert killed == whole


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_own_logger_by_command_alone_or_with_ours(world_size: int, own: Path, python: str) -> None:
    single = command(python, own, "logger=lines", "logger.prefix=alone", f"launcher.nproc_per_node={world_size}")
    assert single.returncode == 0, single.stderr
    assert folders_of(own / "run") == {"lines"}
    assert "see it with" in single.stdout
    assert "cat run/lines/lines.txt" in single.stdout
    assert "tensorboard" not in single.stdout
    assert set((own / "run" / "lines" / "lines.txt").read_text().split()) & {"alone", "1"} <= {"alone", "1"}
    both = command(python, own, "logger=[csv,lines]", "logger.lines.prefix=both", "hydra.run.dir=both")
    assert both.returncode == 0, both.stderr
    assert folders_of(own / "both") == {"csv", "lines"}
    assert (own / "both" / "lines" / "lines.txt").read_text().startswith("both")
    assert both.stdout.index("column -s, -t both/csv/metrics.csv") < both.stdout.index("cat both/lines/lines.txt")


@pytest.mark.parametrize(("experiment", "folders"), quick_each(2, [("several", {"csv", "lines"}), ("table", {"csv"})]))
def test_loggers_of_an_experiment(experiment: str, folders: set[str], own: Path, python: str) -> None:
    done = command(python, own, f"experiment={experiment}", "strategy=single")
    assert done.returncode == 0, done.stderr
    assert folders_of(own / "run") == folders
    done = command(
        python, own, f"experiment={experiment}", "strategy=single", "logger=[lines,tensorboard]", "hydra.run.dir=b"
    )
    assert done.returncode == 0, done.stderr
    assert folders_of(own / "b") == {"lines", "tensorboard"}


REFUSED = {
    "misspelt key": (["logger=lines", "logger.prefx=a"], "Did you mean 'logger.prefix'"),
    "misspelt key that is added": (["logger=lines", "+logger.prefx=a"], "logger.prefx is not a key"),
    "misspelt key of one of several": (["logger=[csv,lines]", "+logger.csv.flush_sec=1"], "mean 'flush_secs'"),
    "misspelt option of several": (["logger=[csv,line]"], "Did you mean 'lines'"),
    "two in one folder": (["logger=[csv,lines]", "logger.lines._target_=ddp_recipes.loggers.CSVLogger"], "prefix"),
    "a folder twice": (["experiment=several", "+logger.b={_target_: ddp_recipes.loggers.CSVLogger}"], "both write"),
    "no such class": (["logger=lines", "logger._target_=own_loggers_module.Lines"], "cannot be found"),
    "merged by Hydra": (["experiment=merged"], "logger=[csv,tensorboard] on the command line"),
    "takes no directory": (["logger=lines", "logger._target_=collections.OrderedDict"], "logger"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_logger_is_refused_before_the_run(case: str, own: Path, python: str) -> None:
    overrides, message = REFUSED[case]
    done = command(python, own, "strategy=single", *overrides)
    assert done.returncode == 2, done.stdout + done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (own / "run").exists()
