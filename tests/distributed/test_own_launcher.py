"""A launcher from outside the package: that of docs/own-launcher.md, by real commands in an otherwise empty folder."""

import json
from pathlib import Path

import pytest

from helpers.pages import ran, requested, unpack

NICE = "launcher=nice"
NO_NICER = "launcher.niceness=0"  # else its ranks wait for all other tests
TINY = [
    *("model=toy", "data=random", "data.num_samples=40", "trainer.max_epochs=1", "logger=none", "hydra.run.dir=run"),
    "launcher.device=cpu",
]
FAULTY = """
import os

import torch


class Faulty(torch.nn.Linear):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training and os.environ["RANK"] == "1":
            {what}
        return super().forward(inputs)
"""

pytestmark = pytest.mark.spawn


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the files of the page, and nothing else."""
    unpack("own-launcher.md", tmp_path)
    return tmp_path


@pytest.mark.slow
def test_own_launcher_runs_a_job_as_local_does(folder: Path, python: str) -> None:
    for name, launcher in {"own": [NICE, NO_NICER], "local": ["launcher=local"]}.items():
        done = ran(python, folder, *TINY, *launcher, "seed=7", f"hydra.run.dir={name}")
        assert done.returncode == 0, done.stderr
    own, local = (json.loads((folder / name / "summary.json").read_text()) for name in ("own", "local"))
    assert (own["status"], own["world_size"]) == ("finished", 2)
    assert own["weights_sha256"] == local["weights_sha256"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "printed", "error"),
    [
        ("raise ValueError('the cat')", ["Rank 1 failed:", "ValueError: the cat"], "rank 1: ValueError: the cat"),
        (
            "os._exit(3)",
            ["Rank 1 exited with exit code 3 and without a report."],
            "Rank 1 exited with exit code 3 and without a report.",
        ),
    ],
    ids=["raises", "exits"],
)
def test_own_launcher_names_the_rank_that_failed(
    folder: Path, python: str, what: str, printed: list[str], error: str
) -> None:
    (folder / "faulty.py").write_text(FAULTY.format(what=what))
    model = ["model=linear", "model._target_=faulty.Faulty"]
    done = ran(python, folder, *TINY, NICE, NO_NICER, *model)
    assert done.returncode == 1
    assert set(printed) <= set(done.stderr.splitlines())
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert error in summary["error"]


REFUSED = {
    "misspelt key": ([NICE, "launcher.nicenes=5"], "Did you mean 'launcher.niceness'?"),
    "misspelt key that is added": ([NICE, "+launcher.nicenes=5"], "Did you mean 'niceness'?"),
    "value out of range": ([NICE, "launcher.niceness=20"], "Allowed: a whole number from 0 to 19."),
    "value of another type": ([NICE, "launcher.niceness=very"], "launcher.niceness=very is not allowed."),
    "module that is not there": (["launcher._target_=no_launcher.Mine"], "No module named 'no_launcher'"),
    "class that is not there": (["launcher._target_=my_launcher.Nise"], "has no attribute 'Nise'"),
    "class that is no launcher": (["launcher._target_=math.log"], "launcher._target_=math.log is no launcher"),
    "name of another launcher": (["launcher=local", "launcher.name=env"], "launcher.name=env is not allowed."),
}


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory, python: str) -> dict[str, tuple[int, str]]:
    """Return how each request ended; none may have written anything."""
    folder = tmp_path_factory.mktemp("refused")
    unpack("own-launcher.md", folder)
    ended = requested(python, folder, {case: [*TINY, *overrides] for case, (overrides, _) in REFUSED.items()})
    assert not (folder / "run").exists()
    return ended


@pytest.mark.parametrize("case", REFUSED)
def test_own_launcher_is_refused_before_anything_starts(case: str, refused: dict[str, tuple[int, str]]) -> None:
    code, err = refused[case]
    assert code == 2, err
    assert REFUSED[case][1] in err
    assert len(err.strip().splitlines()) == 1


KEYS = """
nproc_per_node: 2
nnodes: 1
max_restarts: 0
start_method: forkserver
timeout_s: 60
backend: auto
device: auto
init_method: null
"""


@pytest.mark.parametrize(
    "keys",
    [KEYS, pytest.param("defaults: [auto, _self_]\n", marks=pytest.mark.slow)],
    ids=["alone", "on top of auto"],
)
def test_own_yaml_chooses_a_launcher_by_its_name(folder: Path, python: str, keys: str) -> None:
    (folder / "my_conf" / "launcher" / "named.yaml").write_text(f"{keys}name: local\n")
    done = ran(python, folder, *TINY, "launcher=named")
    assert done.returncode == 0, done.stderr
    assert json.loads((folder / "run" / "summary.json").read_text())["world_size"] == 2
