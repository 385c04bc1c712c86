"""What workflows and hooks call is there, and what is said of the project in several places is the same."""

import re
import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddp_recipes import __version__

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def loaded(path: Path) -> Any:
    """Return a yaml file's content."""
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def steps(path: Path) -> list[dict[str, Any]]:
    """Return the steps of all jobs of a workflow."""
    return [step for job in loaded(path)["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_make_targets_that_are_there(path: Path) -> None:
    called = {name for step in steps(path) for name in re.findall(r"\bmake ([a-z-]+)", step.get("run", ""))}
    assert called
    assert called <= TARGETS


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_may_write_nothing_and_end(path: Path) -> None:
    workflow = loaded(path)
    assert workflow["permissions"] == {"contents": "read"}
    assert all(0 < job["timeout-minutes"] <= 360 for job in workflow["jobs"].values())


def test_the_nightly_matrix_is_that_of_make_matrix() -> None:
    found = runpy.run_path(str(ROOT / ".ci" / "matrix.py"))
    matrix = loaded(ROOT / ".github" / "workflows" / "nightly.yml")["jobs"]["matrix"]["strategy"]["matrix"]
    assert matrix == {"python": [*found["PYTHONS"]], "torch": [*found["TORCHES"]], "hydra": [*found["HYDRAS"]]}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">={found['PYTHONS'][0]}"
    (torch,) = (each for each in project["dependencies"] if each.startswith("torch>="))
    assert torch.startswith(found["TORCHES"]["newest"])


def test_a_citation_and_the_changelog_name_this_version() -> None:
    assert loaded(ROOT / "CITATION.cff")["version"] == __version__
    dated = re.search(rf"^## \[{re.escape(__version__)}\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert dated is not None
    assert dated[1] == loaded(ROOT / "CITATION.cff")["date-released"]


def test_hooks_are_of_tools_that_dev_installs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    hooks = loaded(ROOT / ".pre-commit-config.yaml")["repos"][0]["hooks"]
    commands = {hook["entry"].split()[0].removeprefix(".venv/bin/") for hook in hooks}
    assert commands == {"ruff", "mypy", "lint-imports"}
    assert {"ruff", "mypy", "import-linter", "pre-commit"} <= {*project["optional-dependencies"]["dev"]}
