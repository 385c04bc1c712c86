"""Quick tests and a run of two ranks on each supported set of Python, torch and Hydra, a fresh environment each.

    python .ci/matrix.py [--python 3.11 3.12] [--torch oldest] [--hydra 1.4] [--tests tests/unit] [--jobs 2]

Each takes minutes and gigabytes, is removed after use, and leaves its output in build/matrix/. A Python that is not
installed is named and counts as a failure. Prints a table with the counts; exits with 1 unless all is well.
"""

import argparse
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
TORCHES = {"oldest": "torch==2.10.*", "newest": "torch>=2.10"}  # the upper bound is that of pyproject.toml
HYDRAS = {
    "1.3": ("hydra-core==1.3.*", "omegaconf==2.3.*"),
    "1.4": ("hydra-core>=1.4.0rc1,<1.5", "omegaconf>=2.4.0rc1,<2.5"),  # naming a pre-release lets pip take one
}
TESTS = ("tests/unit", "tests/config")
VERSIONS = "import torch, hydra; print(torch.__version__.partition('+')[0], hydra.__version__)"


@dataclass(frozen=True)
class Cell:
    """A set of versions to try."""

    python: str
    torch: str
    hydra: str

    @property
    def name(self) -> str:
        return f"python-{self.python}_torch-{self.torch}_hydra-{self.hydra}"


def interpreter(version: str) -> str | None:
    """Return a program that is this Python, from the path or from pyenv; ``None`` if there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [sys.executable, f"python{version}", *map(str, sorted(pyenv.glob(f"{version}.*/bin/python")))]
    ask = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
    for candidate in candidates:
        if (program := shutil.which(candidate)) is None:
            continue
        done = subprocess.run([program, "-c", ask], capture_output=True, text=True, check=False)
        if done.stdout.strip() == version:
            return program
    return None


def run_cell(cell: Cell, tests: Sequence[str], jobs: int) -> list[str]:
    """Return the row of the table that says what came of a set of versions."""
    logs = ROOT / "build" / "matrix"
    logs.mkdir(parents=True, exist_ok=True)
    row = [cell.python, cell.torch, cell.hydra]
    if (program := interpreter(cell.python)) is None:
        return [*row, "", "there is no such Python", ""]
    with tempfile.TemporaryDirectory() as folder, (logs / f"{cell.name}.log").open("w") as log:
        python = f"{folder}/venv/bin/python"
        wanted = [TORCHES[cell.torch], *HYDRAS[cell.hydra], "torchvision", "--editable", f"{ROOT}[test]"]
        install = [
            [program, "-m", "venv", f"{folder}/venv"],
            [python, "-m", "pip", "install", "--no-cache-dir", *wanted],
        ]
        if any(logged(command, log, Path(folder)) for command in install):
            return [*row, "", "cannot be installed", ""]
        versions = subprocess.run([python, "-c", VERSIONS], capture_output=True, text=True, check=True).stdout.strip()
        report = Path(folder, "tests.xml")
        quick = ["-m", "not slow and not nightly", "-n", str(jobs), "--dist", "loadfile", "-p", "no:cacheprovider"]
        logged([python, "-m", "pytest", "-q", *quick, f"--junitxml={report}", *tests], log, ROOT)
        smoke = ["strategy=ddp", "launcher.nproc_per_node=2", "launcher.device=cpu", "trainer.max_epochs=1"]
        status = logged([python, str(ROOT / "train.py"), *smoke, "hydra.run.dir=run"], log, Path(folder))
        return [*row, versions, counts(report), "finished" if status == 0 else f"exit status {status}"]


def logged(command: Sequence[str], log: TextIO, folder: Path) -> int:
    """Run a command and return its exit status; all that it prints goes to the log."""
    print("$", *command, file=log, flush=True)
    kept_out = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")  # the tree is installed, and no other one is to be found
    environment = {name: value for name, value in os.environ.items() if name not in kept_out}
    return subprocess.run(
        command, cwd=folder, stdout=log, stderr=subprocess.STDOUT, env=environment, check=False
    ).returncode


def counts(report: Path) -> str:
    """Return how many tests passed, failed and were skipped, by the report that pytest wrote."""
    if not report.exists():
        return "pytest left no report"
    found = [suite.attrib for suite in ET.parse(report).getroot().iter("testsuite")]
    total, skipped = (sum(int(suite[name]) for suite in found) for name in ("tests", "skipped"))
    failed = sum(int(suite[name]) for suite in found for name in ("failures", "errors"))
    return f"{total - failed - skipped} passed, {failed} failed, {skipped} skipped"


def main() -> int:
    """Try the sets that are asked for, all by default."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name, allowed in (("python", PYTHONS), ("torch", tuple(TORCHES)), ("hydra", tuple(HYDRAS))):
        parser.add_argument(f"--{name}", nargs="+", choices=allowed, default=allowed)
    parser.add_argument("--tests", nargs="+", default=TESTS, help="files or folders of tests")
    parser.add_argument("--jobs", type=int, default=2, help="processes that run tests")
    asked = parser.parse_args()
    print("| Python | torch | Hydra | versions of these two | quick tests | run of two ranks |")
    print("| --- | --- | --- | --- | --- | --- |")
    well = True
    for cell in itertools.starmap(Cell, itertools.product(asked.python, asked.torch, asked.hydra)):
        row = run_cell(cell, asked.tests, asked.jobs)
        well = well and row[-1] == "finished" and " 0 failed" in row[-2]
        print(f"| {' | '.join(row)} |", flush=True)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
