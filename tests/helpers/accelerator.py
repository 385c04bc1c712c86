"""OpenReg, torch's simulated accelerator: memory that the host cannot read, and process groups with NCCL's habits."""

import importlib.util
import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from helpers.patience import patience
from helpers.recipes import QUICK
from helpers.warm import warm_python

MISSING = (
    "OpenReg is not installed beside this torch. Its source is in PyTorch, "
    "test/cpp_extensions/open_registration_extension; .ci/run builds it where DDP_RECIPES_OPENREG names a folder with "
    "a build.sh that does"
)
# What sets NCCL apart from gloo, each by a variable of the backend `staged`.
HABITS = {
    "none": {},
    "leaving is a collective": {"STAGED_COLLECTIVE_SHUTDOWN": "1"},
    "a lost rank is waited for": {"STAGED_SILENT": "1"},
    "one device a group": {"STAGED_ONE_DEVICE": "1"},
    "no tensors of the CPU": {"STAGED_REFUSES_CPU": "1"},
}
HABITS["all"] = {name: value for habit in list(HABITS.values()) for name, value in habit.items()}
DEVICE = "launcher.device=openreg"


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    status: int
    out: str
    err: str
    directory: Path

    @property
    def summary(self) -> dict[str, Any]:
        """What ``summary.json`` says."""
        values: dict[str, Any] = json.loads((self.directory / "summary.json").read_text())
        return values


@dataclass(frozen=True)
class Accelerator:
    """Starts commands where there are such devices.

    Attributes:
        python: a Python that has loaded torch with them.
    """

    python: str
    folder: Path

    def run(
        self,
        *overrides: str,
        ranks: int = 1,
        habits: Mapping[str, str] = HABITS["none"],
        name: str = "run",
        command: Sequence[str] = (),
        seconds: float = 120,
        **environ: str,
    ) -> Ended:
        """Run the quick recipe with these overrides on as many devices, and wait for its end.

        Args:
            command: what starts it, in the place of ``-m ddp_recipes``.
        """
        directory = self.folder / name
        own = [DEVICE, f"launcher.nproc_per_node={ranks}", f"hydra.run.dir={directory}"]
        ended = subprocess.run(
            [self.python, *(command or ["-m", "ddp_recipes"]), *QUICK, *own, *overrides],
            cwd=self.folder,
            env={**os.environ, "OPENREG": "1", **habits, **environ},
            capture_output=True,
            text=True,
            timeout=patience(seconds),
        )
        return Ended(ended.returncode, ended.stdout, ended.stderr, directory)


@pytest.fixture(scope="session")
def python_with_devices() -> Iterator[str]:
    """A program like ``python`` that has loaded torch with simulated devices."""
    if importlib.util.find_spec("torch_openreg") is None:
        pytest.skip(MISSING)
    with warm_python("torch.utils.tensorboard", OPENREG="1") as program:
        yield program


@pytest.fixture
def accelerator(python_with_devices: str, tmp_path: Path) -> Accelerator:
    """Commands on simulated devices, in a folder of this test's."""
    return Accelerator(python_with_devices, tmp_path)
