"""The commands themselves."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.patience import patience

pytestmark = [pytest.mark.spawn, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
TRAIN = str(ROOT / "train.py")
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
TINY = [
    "data=random",
    "data.num_samples=64",
    "data.val_samples=21",
    "trainer.max_epochs=1",
    "trainer.num_sanity_val_steps=1",
    "launcher.device=cpu",
]
SWEEP = ["-m", "strategy=ddp", "model=toy,toy_mp", "optimizer.lr=0.1,0.01", *TINY]
RESULTS = {"config.yaml", "summary.json", "train.log", "tensorboard", "checkpoints", ".hydra"}

# Hydra's own view of a sweep: what each job returned to it.
WITNESS = """
import json
from hydra.experimental.callback import Callback

class Witness(Callback):
    def on_job_end(self, config, job_return, **kwargs):
        with open("objectives.jsonl", "a") as file:
            file.write(json.dumps(job_return.return_value) + "\\n")
"""


def command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command; it must succeed."""
    outside = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
    env = {name: value for name, value in os.environ.items() if name not in outside}
    done = subprocess.run(arguments, cwd=cwd, env=env, capture_output=True, text=True, timeout=patience(180))
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def runs_in(folder: Path) -> list[Path]:
    """Return the run directories under a folder, in order."""
    return sorted(path.parent for path in folder.rglob("summary.json"))


def summary_of(folder: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


def assert_complete(folder: Path, world_size: int = 2) -> None:
    """Everything that a finished run leaves, and nothing else."""
    assert {path.name for path in folder.iterdir()} == RESULTS
    assert len(list((folder / "tensorboard").iterdir())) == 1
    assert {path.name for path in (folder / ".hydra").iterdir()} == {"config.yaml", "hydra.yaml", "overrides.yaml"}
    assert (folder / "checkpoints" / "last.pt").exists()
    summary = summary_of(folder)
    assert (summary["status"], summary["world_size"], summary["error"]) == ("finished", world_size, None)


def assert_swept(folder: Path) -> None:
    """The four runs of ``SWEEP``, complete and different, are all there is."""
    runs = runs_in(folder / "multirun")
    assert [run.name for run in runs] == ["0", "1", "2", "3"]
    assert len({run.parent for run in runs}) == 1
    for run in runs:
        assert_complete(run)
    digests = [summary_of(run)["weights_sha256"] for run in runs]
    assert digests[:2] == digests[2:], "toy_mp learns what toy learns"
    assert digests[0] != digests[1], "0.1 is not 0.01"
    assert not (folder / "outputs").exists()


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory, python: str) -> tuple[Path, str]:
    """The folder in which train.py ran once by itself, and what it printed."""
    folder = tmp_path_factory.mktemp("local")
    done = command(python, TRAIN, "strategy=ddp", "model=toy_mp", *TINY, cwd=folder)
    assert "Traceback" not in done.stderr
    return folder, done.stdout


def test_train_makes_one_directory(local: tuple[Path, str]) -> None:
    where, printed = local
    (folder,) = runs_in(where)
    assert folder.parents[1] == where / "outputs"
    assert_complete(folder)
    assert [path.name for path in where.iterdir()] == ["outputs"]
    assert summary_of(folder)["devices_per_replica"] == 2
    for word in ("ToyMP", "ddp over gloo and shared memory", "2 x 2 (CPU)", "val/loss"):
        assert word in printed


def test_torchrun_makes_the_run_that_the_local_launcher_makes(
    local: tuple[Path, str], tmp_path: Path, python: str
) -> None:
    command(python, *TORCHRUN, TRAIN, "strategy=ddp", "model=toy_mp", *TINY, cwd=tmp_path)
    (folder,) = runs_in(tmp_path)
    assert_complete(folder)
    one, other = summary_of(folder), summary_of(*runs_in(local[0]))
    assert one["weights_sha256"] == other["weights_sha256"]
    assert one["metrics"]["val/loss"] == other["metrics"]["val/loss"]


def test_sweep_returns_its_objectives(tmp_path: Path, python: str) -> None:
    """``ddp_recipes.run`` returns a summary for each job, and Hydra gets the monitored metric of each."""
    (tmp_path / "witness.py").write_text(WITNESS)
    overrides = [*SWEEP, "+hydra.callbacks.witness._target_=witness.Witness"]
    (tmp_path / "study.py").write_text(
        f"import json, ddp_recipes\nsummaries = ddp_recipes.run({overrides!r})\n"
        "open('summaries.json', 'w').write(json.dumps(summaries))\n"
    )
    command(python, "study.py", cwd=tmp_path)
    assert_swept(tmp_path)
    summaries = json.loads((tmp_path / "summaries.json").read_text())
    objectives = [json.loads(line) for line in (tmp_path / "objectives.jsonl").read_text().splitlines()]
    assert summaries == [summary_of(run) for run in runs_in(tmp_path)]
    assert objectives == [summary["metrics"]["val/loss"] for summary in summaries]
    assert len(set(objectives)) == 2


def test_sweep_under_torchrun(tmp_path: Path, python: str) -> None:
    command(python, *TORCHRUN, TRAIN, *SWEEP, cwd=tmp_path)
    assert_swept(tmp_path)


def test_own_module_from_another_folder(tmp_path: Path, python: str) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n\nclass Mine(torch.nn.Linear):\n"
        "    def __init__(self, ins, outs, labels):\n        super().__init__(ins, outs)\n"
        "        assert labels == {0: 'cat', 1: {'2': 'dog', 2: [{0.5: 'bird'}]}}, labels\n"
    )
    (tmp_path / "my_conf" / "model").mkdir(parents=True)
    (tmp_path / "my_conf" / "model" / "mine.yaml").write_text(
        "_target_: mine.Mine\nins: ${data.in_features}\nouts: ${data.out_features}\n"
        "labels:\n  0: cat\n  1: {'2': dog, 2: [{0.5: bird}]}\n"
    )
    command(
        python, "-m", "ddp_recipes", "--config-dir", "my_conf", "model=mine", "hydra.run.dir=here", *TINY, cwd=tmp_path
    )
    assert_complete(tmp_path / "here")
    assert "_target_: mine.Mine" in (tmp_path / "here" / "config.yaml").read_text()


def test_run_from_python_with_one_process_and_what_it_refuses(tmp_path: Path, python: str) -> None:
    code = f"""
import os, ddp_recipes
summary = ddp_recipes.run(["strategy=single", "model=toy", "hydra.run.dir=here", *{TINY!r}])
assert summary["status"] == "finished", summary
assert summary["run_directory"] == os.path.abspath("here"), summary
try:
    ddp_recipes.run(["model=toi"])
except ddp_recipes.RequestError as error:
    assert "Did you mean 'toy'?" in str(error)
else:
    raise AssertionError("model=toi was taken")
"""
    command(python, "-c", code, cwd=tmp_path)
    assert_complete(tmp_path / "here", world_size=1)
    assert sorted(os.listdir(tmp_path)) == ["here"]


def test_what_a_script_has_chosen_of_torch_holds_in_its_ranks(tmp_path: Path, python: str) -> None:
    (tmp_path / "mine.py").write_text(f"""
import torch, ddp_recipes

class Wide(torch.nn.Linear):
    def forward(self, input):
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.multiprocessing.get_sharing_strategy() == "file_system"
        return super().forward(input.to(torch.float64))

if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    torch.set_float32_matmul_precision("high")
    torch.use_deterministic_algorithms(True)
    torch.multiprocessing.set_sharing_strategy("file_system")
    own = ["~model", "+model._target_=__main__.Wide", "+model.in_features=10", "+model.out_features=5"]
    own += ["strategy=ddp_exact", "strategy.shards=2", *{TINY!r}]
    for ranks in (1, 2):
        ddp_recipes.run([*own, f"hydra.run.dir={{ranks}}", f"launcher.nproc_per_node={{ranks}}"])
        assert torch.get_float32_matmul_precision() == "high"
""")
    command(python, "mine.py", cwd=tmp_path)
    one, two = (summary_of(tmp_path / ranks) for ranks in ("1", "2"))
    assert one["weights_sha256"] == two["weights_sha256"]
    weights = torch.load(tmp_path / "2" / "checkpoints" / "last.pt", weights_only=True)["model"]
    assert {each.dtype for each in weights.values()} == {torch.float64}


def test_a_question_is_answered_and_nothing_written(tmp_path: Path, python: str) -> None:
    done = command(python, TRAIN, "--cfg", "job", "model=toy_mp", "data=random", cwd=tmp_path)
    assert "_target_: ddp_recipes.models.ToyMP" in done.stdout
    assert not list(tmp_path.iterdir())
