"""The wheel: what is in it, and that an application elsewhere composes from it."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import hydra
import pytest
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl

from ddp_recipes._version import __version__
from hydra_plugins.ddp_recipes_searchpath import DdpRecipesSearchPath

ROOT = Path(__file__).parents[2]

# An application of somebody else. It prints what it composed, where it came from, and whether that loaded torch.
APP = """\
import importlib.util, json, sys
import hydra
from omegaconf import DictConfig, OmegaConf

@hydra.main(VERSION_BASE config_path=".", config_name="config")
def main(config: DictConfig) -> None:
    found = importlib.util.find_spec("ddp_recipes.conf")
    print(json.dumps({
        "model": OmegaConf.to_container(config.model, resolve=True),
        "batch_size": config.data.batch_size,
        "length": config.length,
        "conf": found.origin,
        "plugin": sys.modules["hydra_plugins.ddp_recipes_searchpath"].__file__,
        "torch": "torch" in sys.modules,
    }))

main()
""".replace("VERSION_BASE", 'version_base="1.3",' if hydra.__version__.startswith("1.3.") else "")

CONFIG = """\
defaults: [task: classification, data: random, model: toy, _self_]
seed: 0
sizes: [1, 2, 3]
length: ${len:${sizes}}
hydra:
  output_subdir: null
  run: {dir: .}
"""

SEARCHPATH = "  searchpath: [pkg://ddp_recipes.conf]\n"


def pip(*arguments: str | Path) -> None:
    """Run pip without the network: the build backend is the environment's own setuptools."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the tree, so that nothing is left in the tree itself."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "tree"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("src", "conf"):
        ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignore)
    pip("wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", folder, copy)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    pip("install", "--no-deps", "--no-index", "--target", target, wheel)
    return target


@pytest.mark.slow
def test_wheel_holds_everything(wheel: Path) -> None:
    assert wheel.name == f"ddp_recipes-{__version__}-py3-none-any.whl"
    names = set(zipfile.ZipFile(wheel).namelist())
    conf = {f"ddp_recipes/conf/{path.relative_to(ROOT / 'conf')}" for path in (ROOT / "conf").rglob("*.yaml")}
    code = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src").rglob("*.py")}
    template = ROOT / "src" / "ddp_recipes" / "template"
    files = [path for path in template.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert len(files) > 10
    assert {str(path.relative_to(ROOT / "src")) for path in files} <= names
    pages = {
        str(path.relative_to(ROOT / "src"))
        for kind in ("html", "css", "js")
        for path in (ROOT / "src").rglob(f"*.{kind}")
    }
    assert len(conf) > 20
    assert pages
    assert pages <= names
    assert conf <= names
    assert code <= names
    assert {"ddp_recipes/py.typed", "ddp_recipes/conf/__init__.py"} <= names
    assert "hydra_plugins/ddp_recipes_searchpath/__init__.py" in names
    assert "hydra_plugins/__init__.py" not in names, "a namespace package is shared with other distributions"
    assert {name.split("/")[0] for name in names} == {
        "ddp_recipes",
        "hydra_plugins",
        f"ddp_recipes-{__version__}.dist-info",
    }


@pytest.mark.parametrize("searchpath", ["", SEARCHPATH], ids=["the plugin alone", "hydra.searchpath"])
@pytest.mark.slow
def test_application_elsewhere_composes(searchpath: str, installed: Path, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "config.yaml").write_text(CONFIG + searchpath)
    done = subprocess.run(
        [sys.executable, "app.py", "data.in_features=7"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "Hydra warns of a search path that it cannot use"
    composed = json.loads(done.stdout)
    assert composed["model"]["_target_"] == "ddp_recipes.models.Toy"
    assert composed["model"]["in_features"] == 7
    assert composed["batch_size"] == 20
    assert composed["length"] == 3
    assert composed["conf"] == str(installed / "ddp_recipes" / "conf" / "__init__.py")
    assert composed["plugin"] == str(installed / "hydra_plugins" / "ddp_recipes_searchpath" / "__init__.py")
    assert not composed["torch"], "Hydra imports the plugin in every application"


def test_plugin_appends_once_and_last() -> None:
    search_path = ConfigSearchPathImpl()
    search_path.append("main", "file:///app/conf")
    for _ in range(2):
        DdpRecipesSearchPath().manipulate_search_path(search_path)
    assert [element.path for element in search_path.get_path()] == ["file:///app/conf", "pkg://ddp_recipes.conf"]
