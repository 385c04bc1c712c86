"""OpenReg, torch's simulated accelerator: memory that the host cannot read, and process groups with NCCL's habits."""

import importlib.util
import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
DISTURBING = """
import os
from pathlib import Path

from ddp_recipes import Callback


class Disturbing(Callback):
    def __init__(self, rank, step, how):
        self.mine, self.at, self.how = rank == int(os.environ.get("RANK", 0)), step, how

    def on_step(self, step):
        done = Path(f"done_{os.environ.get('RANK', 0)}")
        if not self.mine or step != self.at or done.exists():
            return
        done.touch()
        if self.how == "raise":
            raise ValueError("the cat sat on the keyboard")
        os.kill(os.getpid(), self.how)
"""


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


def disturbed(folder: Path, how: object, rank: int = 1, step: int = 2) -> str:
    """Return the override by which a rank raises or sends itself a signal after a step, once in a folder."""
    (folder / "disturbing.py").write_text(DISTURBING)
    target = f"_target_: disturbing.Disturbing, rank: {rank}, step: {step}, how: {how}"
    return f"+callbacks.disturbing={{{target}}}"


@contextmanager
def _python(count: int) -> Iterator[str]:
    """Yield a program like ``python`` that has loaded torch with so many simulated devices."""
    if importlib.util.find_spec("torch_openreg") is None:
        pytest.skip(MISSING)
    with warm_python("torch.utils.tensorboard", OPENREG="1", OPENREG_DEVICES=str(count)) as program:
        yield program


@pytest.fixture(scope="session")
def python_with_devices() -> Iterator[str]:
    """A program like ``python`` that has loaded torch with four simulated devices."""
    with _python(4) as program:
        yield program


@pytest.fixture(scope="session")
def pythons_with_devices(python_with_devices: str) -> Iterator[dict[int, str]]:
    """The same with one, two and four."""
    with _python(1) as one, _python(2) as two:
        yield {1: one, 2: two, 4: python_with_devices}


@pytest.fixture
def accelerator(python_with_devices: str, tmp_path: Path) -> Accelerator:
    """Commands on four simulated devices, in a folder of this test's."""
    return Accelerator(python_with_devices, tmp_path)
