"""A second user of this machine, who attacks runs of the first."""

import os
import shutil
from pathlib import Path

import pytest

from helpers.processes import OWN_MODELS


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return an empty folder but for ``own_models.py``."""
    shutil.copy(OWN_MODELS, tmp_path)
    return tmp_path


@pytest.fixture
def stranger() -> int:
    """The id of another user, whose processes only root can start."""
    if os.geteuid() != 0:
        pytest.skip("only root can start the processes of a second user")
    return 65534
