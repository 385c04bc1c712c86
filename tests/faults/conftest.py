"""Every fault test gets a folder of its own to start runs from, with a user's own models in it."""

import shutil
from pathlib import Path

import pytest

from helpers.processes import OWN_MODELS


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return an empty folder but for ``own_models.py``."""
    shutil.copy(OWN_MODELS, tmp_path)
    return tmp_path
