"""What docs/elsewhere.md says of other places, run here as far as they can be: the pods' own command, mpirun."""

import json
import os
import re
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
import yaml

from helpers.patience import patience

PAGE = (Path(__file__).parents[2] / "docs" / "elsewhere.md").read_text(encoding="utf-8")

pytestmark = [pytest.mark.slow, pytest.mark.spawn]


@pytest.fixture
def environ(tmp_path: Path, python: str) -> dict[str, str]:
    """An environment in which ``torchrun`` and ``python`` have loaded torch already."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, module in (("torchrun", "-m torch.distributed.run"), ("python", "")):
        (programs / name).write_text(f'#!/bin/sh\nexec "{python}" {module} "$@"\n')
        (programs / name).chmod(0o700)
    return os.environ | {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}


def test_the_pods_of_the_kubernetes_manifest_make_one_run(tmp_path: Path, environ: dict[str, str]) -> None:
    found = re.search(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    replicas = yaml.safe_load(found[1])["spec"]["pytorchReplicaSpecs"]
    containers = [replicas[kind]["template"]["spec"]["containers"][0] for kind in ("Master", "Worker")]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pods = [
        subprocess.Popen(
            [*container["command"], container["args"][0].replace("/runs/", f"{tmp_path}/runs/")],
            cwd=tmp_path,
            # What the training operator sets in each pod.
            env=environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, container in enumerate(containers)
    ]
    outputs = [pod.communicate(timeout=patience(60))[0] for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], "\n".join(outputs)
    summary = json.loads((tmp_path / "runs" / "toy" / "summary.json").read_text())
    assert (summary["world_size"], summary["nnodes"], summary["status"]) == (2, 2, "finished")


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed")
def test_mpirun_starts_the_ranks(tmp_path: Path, environ: dict[str, str]) -> None:
    assert "mpirun -n 2 python train.py strategy=ddp" in PAGE
    command = ["mpirun", "-n", "2", "--oversubscribe", "python", "-m", "ddp_recipes", "strategy=ddp"]
    if os.geteuid() == 0:
        command.insert(1, "--allow-run-as-root")
    quick = ["model=toy", "trainer.max_epochs=1", "hydra.run.dir=run"]
    subprocess.run([*command, *quick], cwd=tmp_path, env=environ, check=True, capture_output=True, timeout=patience(60))
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["world_size"] == 2
