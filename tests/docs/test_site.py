"""The site: its shelves hold every page, its reference every key, and it builds strictly."""

import dataclasses
import json
import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers.patience import patience

ROOT = Path(__file__).parents[2]
CONF = ROOT / "conf"
PAGES = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}


class Navigation(yaml.SafeLoader):
    """Reads mkdocs.yml without the objects that it names."""


Navigation.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)


def shelved(nav: Any) -> list[str]:
    """Return the pages of a navigation, in its order."""
    if isinstance(nav, str):
        return [nav]
    return [page for part in (nav.values() if isinstance(nav, dict) else nav) for page in shelved(part)]


@pytest.fixture(scope="module")
def nav() -> Any:
    return yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Navigation)["nav"]


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "docs" / "hooks" / "reference.py"))


def test_every_page_is_on_a_shelf(nav: Any) -> None:
    made = {page for page in shelved(nav) if page.startswith(("index", "reference/", "repository/"))}
    assert {*shelved(nav)} - made == PAGES


def test_readme_lists_the_pages_of_the_shelves(nav: Any) -> None:
    more = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## More\n")[2]
    listed = re.findall(r"\]\(docs/([^)#]+)\)", more)
    assert listed == [page for page in shelved(nav) if page in PAGES]


@pytest.mark.slow
def test_reference_has_every_key_of_every_yaml_with_its_meaning(reference: dict[str, Any]) -> None:
    page = reference["keys_page"]()
    rows = dict(re.findall(r"^\| `([\w.]+)` \| .* \|([^|]*) \|$", page, re.MULTILINE))
    top = reference["entries"](CONF / "train.yaml")
    keys = {".".join(entry.path) for entry in top if entry.path[0] != "hydra"}
    for group in ("trainer", "strategy", "launcher", "checkpoint", "data", "model", "task", "optimizer", "scheduler"):
        for path in (CONF / group).glob("*.yaml"):
            names = set(yaml.safe_load(path.read_text(encoding="utf-8")) or {}) - {"defaults", "_target_", "_partial_"}
            keys |= {f"{group}.{name}" for name in names}
    nested = {key.rpartition(".")[0] for key in rows}
    assert {key for key in keys - nested if not rows.get(key, "").strip() and not key.endswith("_target_")} == set()


@pytest.mark.slow
def test_reference_has_every_field_of_the_settings(reference: dict[str, Any]) -> None:
    page = reference["keys_page"]()
    for section, settings in reference["SECTIONS"].items():
        prefix = f"{section}." if section else ""
        assert [f.name for f in dataclasses.fields(settings) if f"`{prefix}{f.name}`" not in page] == []
    for group in ("strategy", "launcher"):
        for path in (CONF / group).glob("*.yaml"):
            values = yaml.safe_load(path.read_text(encoding="utf-8"))
            settings = reference["settings_of"](group, values)
            assert [f.name for f in dataclasses.fields(settings) if f"`{group}.{f.name}`" not in page] == []


@pytest.mark.slow
@pytest.mark.spawn
def test_every_key_of_a_summary_is_on_its_page(tmp_path: Path, python: str) -> None:
    command = [python, "-m", "ddp_recipes", "strategy=single", "trainer.max_steps=1", "hydra.run.dir=run"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=patience(60))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "run-directory.md").read_text(encoding="utf-8").partition("\n## summary.json\n")[2]
    assert [key for key in summary if f"`{key}`" not in page] == []


@pytest.mark.slow
@pytest.mark.spawn
@pytest.mark.skipif(find_spec("mkdocs") is None, reason="not installed: mkdocs")
def test_site_builds_without_a_broken_link(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=patience(120), check=False)
    assert done.returncode == 0, done.stderr
    assert "trainer.max_epochs" in (tmp_path / "site" / "reference" / "keys.html").read_text(encoding="utf-8")
