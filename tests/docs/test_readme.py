"""Every command in README.md and docs/ runs, and prints what the page shows of it; numbers and dates may differ.

A block of commands runs in a copy of the repository of its own, together with the files that its page shows: a block of
Python or yaml whose first line names a file (``# my_models.py``), below the line with a yaml's package, which Hydra
reads in the first line alone. Other Python blocks run as they are.

What ``python`` loads before it runs a command, it loads once for all of them: most of what a command would cost.
"""

import os
import re
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from helpers.patience import patience
from helpers.trackers import QUIET
from helpers.warm import warm_python

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
MARKDOWN = {page: page.read_text(encoding="utf-8") for page in PAGES}

FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE_NAME = re.compile(r"(?:# @package _global_\n)?# ([\w./]+\.(?:py|yaml))\n")
NUMBER = re.compile(r"\d[\d.,:e+-]*")
ANOTHER_SET_UP = ("git clone ", "cd ", "make ", "make\n", "source ", "pip install ", ".ci/run")

# Of the extra `peers`: a page's files or commands name it, or the block shows a picture.
PEER = re.compile(
    r"(?<![\w./])(?:datasets|lightning(?=\.pytorch)|matplotlib|mlflow|optuna|peft|timm|transformers|wandb)\b"
)
# What commands load in each of their processes, or torchrun in its own.
LOADED = [
    "matplotlib.figure",
    "torch.distributed.launcher.api",
    "torch.utils.tensorboard",
    "torchvision",
    "transformers.models.bert.modeling_bert",
]

# `tensorboard` would run for ever: what counts is that it starts and serves.
TENSORBOARD = """\
#!{python}
import subprocess, sys
command = [sys.executable, "-m", "tensorboard.main", *sys.argv[1:], "--host=127.0.0.1", "--port=0"]
with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
    serves = any("http://127.0.0.1" in line for line in server.stderr)
    server.terminate()
sys.exit(not serves)
"""
# For every change all of what a newcomer comes by first, and of other pages each fifth block; all of them at night.
FIRST = ("README.md", "CONTRIBUTING.md", "first-steps.md")
EACH = 5
# Nor is this for every change: a language model is trained for as long as 40 other blocks together; a ResNet-18 is
# profiled for 12 steps, the real MNIST takes an epoch, a compiler begins, a ResNet is
# fine-tuned, and Optuna trains eight times, each as long as 10. `make test-nightly` runs them.
NIGHTLY = ("experiment=gpt", "debug=profiler", "experiment=mnist", "logger=[wandb,mlflow]", "trainer.compile=true")
NIGHTLY += ("model=timm_resnet", "hydra/sweeper=optuna")
MODULE = '#!/bin/sh\nexec "{python}" -m {module} "$@"\n'


@dataclass(frozen=True)
class Block:
    """Commands of a page, and the lines that it shows of their output."""

    page: Path
    number: int
    commands: str
    shown: tuple[str, ...]
    nodes: int  # how many machines the page tells to run it

    @property
    def name(self) -> str:
        first = self.commands.splitlines()[0]
        return f"{self.page.name}-{self.number}-{first[:60]}"

    @property
    def files(self) -> dict[str, str]:
        """The files that the page shows, by name."""
        texts = [text for language, _, text in FENCE.findall(MARKDOWN[self.page]) if language in ("python", "yaml")]
        return {name[1]: text for text in texts if (name := FILE_NAME.match(text))}

    @property
    def missing(self) -> list[str]:
        """The packages that it needs and that are not installed."""
        needs = set(PEER.findall("\n".join([self.commands, *self.files.values()])))
        if any(line.endswith(".png") for line in self.shown) or "curves.py" in self.commands:
            needs.add("matplotlib")
        return sorted(name for name in needs if find_spec(name) is None)


def blocks(page: Path) -> list[Block]:
    """Return what a page says to run, in its order."""
    found = []
    for number, match in enumerate(FENCE.finditer(MARKDOWN[page]), 1):
        language, info, text = match.groups()
        lines = text.splitlines()
        shown: list[str] = []
        if language == "console":
            commands = "\n".join(line[2:] for line in lines if line.startswith(("$ ", "> ")))
            shown = [line for line in lines if not line.startswith(("$ ", "> ")) and line.strip() not in ("", "…")]
        elif language == "bash":
            commands = text.strip()
        elif language == "python" and not FILE_NAME.match(text):
            commands = f"python - <<'END'\n{text}END"
        else:
            continue
        found.append(Block(page, number, commands, tuple(shown), 2 if "nodes=2" in info else 1))
    return found


ALL = [block for page in PAGES for block in blocks(page)]
# What slurm.md tells needs a cluster; tests/slurm runs it where there is one.
RUN = [block for block in ALL if block.page.name != "slurm.md" and not block.commands.startswith(ANOTHER_SET_UP)]


def tiered(block: Block) -> Any:
    """Return a block as a case of its test."""
    others = [each for each in RUN if each.page == block.page]
    often = block.page.name in FIRST or others.index(block) % EACH == 0
    nightly = not often or any(part in block.commands for part in NIGHTLY)
    return pytest.param(block, id=block.name, marks=[pytest.mark.nightly] if nightly else [])


@pytest.fixture(scope="module")
def python() -> Iterator[str]:
    """A program like ``python`` that has loaded what most commands here need."""
    with warm_python(*(name for name in LOADED if find_spec(name.partition(".")[0]))) as program:
        yield program


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of what the commands use."""
    copy = tmp_path / "ddp_recipes"
    copy.mkdir()
    shutil.copy(ROOT / "train.py", copy)
    shutil.copytree(ROOT / "docs" / "examples", copy / "docs" / "examples")
    return copy


@pytest.fixture
def environ(tmp_path: Path, python: str) -> dict[str, str]:
    """An activated environment, whatever the one that runs this test is called."""
    programs = tmp_path / "bin"
    programs.mkdir()
    texts = {
        "ddp-recipes": MODULE.format(python=python, module="ddp_recipes"),
        "torchrun": MODULE.format(python=python, module="torch.distributed.run"),
        "tensorboard": TENSORBOARD.format(python=sys.executable),
    }
    for name, text in texts.items():
        (programs / name).write_text(text)
        (programs / name).chmod(stat.S_IRWXU)
    (programs / "python").symlink_to(python)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return (
        os.environ
        | QUIET
        | {
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "PORT": str(port),
            "HEAD": "127.0.0.1",
            "COLUMNS": "200",
        }
    )


def plain(text: str) -> str:
    """Return a line without its numbers (an exit status stays) and without repeated spaces."""
    if text.startswith("exit status"):
        return text
    return " ".join(NUMBER.sub("#", text).split())


@pytest.mark.slow
@pytest.mark.spawn
@pytest.mark.parametrize("block", [tiered(block) for block in RUN])
def test_commands_run_and_print_what_is_shown(
    block: Block, folder: Path, environ: dict[str, str], request: pytest.FixtureRequest
) -> None:
    if block.missing:
        pytest.skip(f"not installed: {', '.join(block.missing)}")
    if "$MNIST" in block.commands:
        environ["MNIST"] = str(request.getfixturevalue("mnist_root"))
    for name, text in block.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    nodes = [
        subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", block.commands],
            cwd=folder,
            env=environ | {"NODE": str(node)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(block.nodes)
    ]
    try:
        outputs = [node.communicate(timeout=patience(60))[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0] * block.nodes, "\n".join(outputs)
    printed = {plain(line) for line in outputs[0].splitlines()}
    missing = [line for line in block.shown if plain(line) not in printed]
    assert not missing, f"shown but not printed: {missing}\n{outputs[0]}"


def test_make_targets_that_pages_name_are_there() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {name for text in MARKDOWN.values() for name in re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE)}
    assert {"train", "test"} <= named <= targets


def test_table_of_groups_lists_what_is_there() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \|", MARKDOWN[ROOT / "README.md"], re.MULTILINE)
    listed = {group: set(re.findall(r"`(\w+)`", options)) for group, options in rows}
    folders = [path for path in (ROOT / "conf").iterdir() if path.is_dir() and path.name not in ("base", "__pycache__")]
    there = {path.name: {option.stem for option in path.glob("*.yaml")} for path in folders}
    assert listed == there


def test_every_example_is_shown() -> None:
    readme = MARKDOWN[ROOT / "README.md"]
    experiments = {path.stem for path in (ROOT / "conf" / "experiment").glob("*.yaml")}
    assert {name for name in experiments if f"experiment={name}" in readme} == experiments


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_pictures_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", MARKDOWN[page])
    local = [target for target in targets if not target.startswith("https://")]
    assert [target for target in local if not (page.parent / target).exists()] == []
