"""Memory that one step frees serves the next."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.spawn, pytest.mark.slow]  # glibc reads its environment where a program starts

ROOT = Path(__file__).parents[2]
# Outputs of 8 MB a layer.
RUN = ["data=random", "data.num_samples=16384", "data.batch_size=4096", "model=mlp", "model.hidden_features=[512,512]"]
QUIET = ["data.val=null", "trainer.max_epochs=8", "checkpoint.enabled=false", "logger=none", "launcher.device=cpu"]


@pytest.mark.parametrize(
    ("environ", "taken"), [({}, range(100)), ({"MALLOC_TRIM_THRESHOLD_": "131072"}, range(1000, 10**6))], ids=str
)
def test_steps_take_no_memory_anew_unless_the_environment_says_so(
    environ: dict[str, str], taken: range, tmp_path: Path
) -> None:
    noted = tmp_path / "page_faults"
    faults = f"+callbacks.faults={{_target_: own_parts.PageFaults, path: {noted}}}"
    command = [sys.executable, str(ROOT / "train.py"), *RUN, *QUIET, faults, "launcher.nproc_per_node=1"]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), **environ}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert int(float(noted.read_text())) in taken
