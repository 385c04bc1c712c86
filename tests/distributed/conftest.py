"""Parts of a user's own for runs on forked ranks, and what a run left behind."""

import json
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from helpers.recipes import OFTEN_USED


@pytest.fixture(scope="session", autouse=True)
def loads_once() -> None:
    """Load what takes a forked rank half a second to two, for it need not where this process has."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in OFTEN_USED:
            if find_spec(name) is not None:
                import_module(name)


@pytest.fixture(autouse=True)
def own_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let configs name what is in ``own_parts.py``."""
    monkeypatch.syspath_prepend(Path(__file__).parent)


@pytest.fixture
def weights() -> Callable[[Any], dict[str, Any]]:
    """Return the weights in the last checkpoint of a run, by its summary."""
    from ddp_recipes.checkpointing.files import newest_first
    from ddp_recipes.checkpointing.reading import load
    from ddp_recipes.runtime.tensors import put_together

    def of(summary: Any) -> dict[str, Any]:
        last = newest_first(Path(summary["run_directory"]) / "checkpoints")[0]
        model: dict[str, Any] = put_together(load(last)["model"])
        return model

    return of


@pytest.fixture
def notes(tmp_path: Path) -> Callable[[], list[dict[str, Any]]]:
    """Return what each rank noted; the run needs the overrides in ``notes.overrides``."""
    folder = tmp_path / "notes"
    folder.mkdir()

    def read() -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted(folder.iterdir())]

    return read


@pytest.fixture
def noting(tmp_path: Path) -> str:
    """The override that has each rank take notes."""
    return f"+callbacks.notes={{_target_: own_parts.Notes, folder: {tmp_path / 'notes'}}}"
