"""Plug-ins of Hydra that others write."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import pytest

from helpers.patience import patience

# Hydra alone, without anything of ours.
APP = """\
import hydra
hydra.main(config_path=None{})(lambda config: 0.0)()
"""


@contextmanager
def plugin(name: str, folder: Path, *overrides: str) -> Iterator[None]:
    """Skip a test where a plug-in is not installed, or fails in a sweep of an application that does nothing, too.

    Args:
        folder: for that application.
        overrides: that choose the plug-in, and sweep over ``x``.
    """
    pytest.importorskip(f"hydra_plugins.{name}", reason=f"{name} is not installed")
    try:
        yield
    except AssertionError:
        base = ', version_base="1.3"' if version("hydra-core").startswith("1.3.") else ""
        (folder / "plain.py").write_text(APP.format(base))
        command = [sys.executable, "plain.py", "-m", f"hydra.sweep.dir={folder / 'plain'}", *overrides]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=patience(60))
        if done.returncode == 0:
            raise
        pytest.skip(f"{name} does not work with Hydra {version('hydra-core')}: {' '.join(done.stderr.split())[-400:]}")
