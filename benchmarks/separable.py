"""The deletion test: take each extra away, with its yaml, docs and tests, and see that all else still works.

    python -m benchmarks.separable [names of extras] [--tests PATHS] [--rotate TEXT]

In a copy of the repository each extra in turn, and what is built on it, is removed: ruff, mypy and import-linter have
to pass, every module that is left has to be imported, a default run on two ranks has to finish, and with ``--tests``
the quick tests of the rest. Docs are not run: their pages show
commands of several extras.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from benchmarks.extras import PACKAGE, ROOT, extras, going_with

AT_A_TIME = 2
TIMEOUT_S = 1800
NOTHING = "(nothing)"
# An editable install has its own folder on the path, in which mypy and namespace packages find what is taken away.
SITE = """\
import os
import sys

here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
others = [path for path in sys.path if os.path.isdir(os.path.join(path, "ddp_recipes")) and not path.startswith(here)]
sys.path[:] = [path for path in sys.path if path not in others]
"""
IMPORTS = f"""\
import importlib, pkgutil, {PACKAGE}
names = [found.name for found in pkgutil.walk_packages({PACKAGE}.__path__, "{PACKAGE}.")]
for name in names:
    if not name.startswith(("{PACKAGE}.conf", "{PACKAGE}.template", "{PACKAGE}.__main__")):
        importlib.import_module(name)
"""
DEFAULT_RUN = ("launcher.nproc_per_node=2", "launcher.device=cpu", "trainer.max_epochs=1")


@dataclass
class Row:
    """What came of one extra's deletion.

    Attributes:
        failures: what failed, with the end of what it printed.
        tests: the last line of pytest, if it ran.
    """

    name: str
    gone: Sequence[str]
    seconds: float = 0.0
    failures: dict[str, str] = field(default_factory=dict)
    tests: str = ""

    def __str__(self) -> str:
        came = "ok" if not self.failures else f"**{', '.join(self.failures)}**"
        return f"| {self.name} | {', '.join(self.gone[1:])} | {came} | {self.tests} | {self.seconds:.0f} |"


def tree() -> list[Path]:
    """Return the files of the working tree that git knows or would add, relative to it."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    return [Path(name) for name in names if os.path.lexists(ROOT / name)]


def copy(folder: Path, files: Sequence[Path]) -> None:
    """Copy files of the working tree, with their times, by which mypy's cache goes; and that, if there is one."""
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    if (cache := ROOT / ".mypy_cache").is_dir():
        shutil.copytree(cache, folder / cache.name)
    (folder / ".site").mkdir()
    (folder / ".site" / "sitecustomize.py").write_text(SITE)
    for command in ("git init --quiet", "git add --all"):  # tests and linters ask git what there is
        subprocess.run(command.split(), cwd=folder, check=True)


def take_away(folder: Path, name: str) -> None:
    """Remove the files of an extra, and folders that are empty then."""
    for path in list(extras()[name].paths(folder)):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        while not any(path.parent.iterdir()):
            path = path.parent
            path.rmdir()


def commands(without: str, tests: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield what has to pass, with the name that the table shows."""
    yield "ruff", ["ruff", "check", "."]
    yield "mypy", ["mypy", "--strict"]
    yield "contracts", ["lint-imports"]
    yield "imports", [sys.executable, "-c", IMPORTS]
    yield "default run", [sys.executable, "train.py", *DEFAULT_RUN]
    if tests:
        plugin = ["-p", "benchmarks.without", "-p", "no:cacheprovider"] if without else []
        options = ["-q", "-n", str(AT_A_TIME), "--dist", "loadfile", "-m", "not slow and not nightly"]
        yield "tests", [sys.executable, "-m", "pytest", *options, *plugin, *tests]


def environment(folder: Path, without: str) -> Mapping[str, str]:
    """Return the variables that commands in a copy of the repository run with."""
    path = os.pathsep.join(map(str, (folder / ".site", folder / "src", folder)))
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return os.environ | {"PYTHONPATH": path, "PATH": programs, "WITHOUT": without}


def check(folder: Path, name: str, tests: Sequence[str]) -> Row:
    """Take an extra away in a copy of the repository, and run what has to pass without it."""
    gone = [] if name == NOTHING else going_with(name)
    for extra in gone:
        take_away(folder, extra)
    without = "|".join(f"(?:{extras()[extra].names})" for extra in gone)
    row, began = Row(name, gone), time.monotonic()
    for step, command in commands(without, tests):
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                env=environment(folder, without),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=TIMEOUT_S,
            )
        except subprocess.TimeoutExpired as late:
            row.failures[step] = f"{late}"
            continue
        if done.returncode:
            row.failures[step] = done.stdout
        if step == "tests":
            row.tests = re.sub(r" in [\d.]+s.*", "", done.stdout.strip().rpartition("\n")[2].strip("= "))
    row.seconds = time.monotonic() - began
    return row


def main(arguments: Sequence[str]) -> int:
    """Print a row an extra, and what failed; return how many did."""
    parser = argparse.ArgumentParser(description="Take each extra away, and see that all else still works.")
    parser.add_argument("names", nargs="*", metavar="extra", help=f"of: {', '.join(extras())}; none: all")
    parser.add_argument("--tests", default="", help="run the quick ones of these tests as well, such as tests/unit")
    parser.add_argument("--rotate", default="", metavar="TEXT", help="--tests for one extra only, which TEXT picks")
    parser.add_argument("--lines", type=int, default=15, help="to show of what failed")
    given = parser.parse_args(arguments)
    if unknown := set(given.names) - extras().keys():
        parser.error(f"{', '.join(sorted(unknown))}: no extra. Allowed: {', '.join(extras())}.")
    names = given.names or list(extras())
    picked = {names[zlib.crc32(given.rotate.encode()) % len(names)]} if given.rotate else set(names)
    failed = 0
    with tempfile.TemporaryDirectory(prefix="separable") as scratch:
        whole = Path(scratch, "whole")
        copy(whole, tree())
        print("| without | and so without | | tests | s |\n| --- | --- | --- | --- | ---: |")
        first = check(whole, NOTHING, [])
        print(first, flush=True)

        def of(name: str) -> Row:
            folder = Path(scratch, name)
            shutil.copytree(whole, folder, symlinks=True)  # with mypy's cache
            try:
                return check(folder, name, given.tests.split() if name in picked else [])
            finally:
                shutil.rmtree(folder)

        with ThreadPoolExecutor(AT_A_TIME) as pool:
            for row in chain([first], pool.map(of, names)):  # each as soon as it and those before are there
                if row is not first:
                    print(row, flush=True)
                failed += bool(row.failures)
                for step, text in row.failures.items():
                    shown = "\n".join(text.strip().splitlines()[-given.lines :])
                    print(f"\n{row.name}, {step}:\n{shown}\n", file=sys.stderr, flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(min(1, main(sys.argv[1:])))
