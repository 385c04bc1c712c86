"""What ``make gpu`` tries on GPUs, tried on simulated devices."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.accelerator import Accelerator
from helpers.patience import patience

ROOT = Path(__file__).parents[2]


@pytest.mark.nightly
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_the_runs_of_make_gpu_end_as_they_should(devices: int, accelerator: Accelerator) -> None:
    limit_s = patience(1200)  # a few processors do the work of all devices
    ended = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--rehearse", "openreg", f"--limit={limit_s}"],
        cwd=accelerator.folder,
        env={**os.environ, "OPENREG": "1", "OPENREG_DEVICES": str(devices)},
        capture_output=True,
        text=True,
        timeout=limit_s + 60,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
