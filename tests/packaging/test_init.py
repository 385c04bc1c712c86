"""``ddp-recipes init`` writes a project that trains, sweeps and passes its tests."""

import json
import subprocess
from pathlib import Path

import pytest

from ddp_recipes.errors import RequestError
from ddp_recipes.project import init
from helpers.patience import patience

QUICK = ["trainer.max_epochs=1", "data.train.num_samples=64", "launcher.device=cpu", "logger=none"]


@pytest.mark.slow
def test_a_new_project_trains_sweeps_and_tests(tmp_path: Path, python: str) -> None:
    def ran(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([python, *arguments], cwd=folder, capture_output=True, text=True, timeout=patience(120))

    done = ran(tmp_path, "-m", "ddp_recipes", "init", "my-first")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("\n  cd my-first\n  python train.py\nREADME.md there says what comes next.\n")
    folder = tmp_path / "my-first"
    assert all("my_project" not in path.read_text() for path in folder.rglob("*") if path.is_file())
    assert (folder / "my_first" / "model.py").exists()
    done = ran(folder, "train.py", *QUICK, "hydra.run.dir=run", "experiment=wide")
    assert done.returncode == 0, done.stderr
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert (summary["status"], summary["world_size"]) == ("finished", 2)
    ours = ["-m", "ddp_recipes", "--config-dir", "conf", "--config-name", "config"]
    done = ran(folder, *ours, "-m", *QUICK, "hydra.sweep.dir=sweep", "optimizer.lr=0.1,0.01")
    assert done.returncode == 0, done.stderr
    for job in "01":
        assert json.loads((folder / "sweep" / job / "summary.json").read_text())["status"] == "finished"
    done = ran(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "init takes the folder of the new project"),
        (["--help"], "init takes the folder of the new project"),
        (["full"], "full is there and is not empty, and nothing is overwritten"),
        (["torch"], "there is a package torch already"),
        (["3d"], "no package can be called 3d"),
        (["class"], "no package can be called class"),
        (["/dev/null/new"], r"/dev/null/new cannot be written: Not a directory\. Give another folder\."),
    ],
)
def test_init_refuses_what_it_cannot_write(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    with pytest.raises(RequestError, match=message):
        init(arguments)
    assert [path.name for path in tmp_path.rglob("*")] == ["full", "file"]


def test_init_takes_an_empty_folder_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "empty").mkdir()
    init([str(tmp_path / "empty")])
    assert "empty.model.Net" in (tmp_path / "empty" / "conf" / "model" / "net.yaml").read_text()
