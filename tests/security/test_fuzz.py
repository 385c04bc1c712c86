"""Two thousand damaged and hostile files: each is read or refused in words, and nothing of it is run."""

import importlib.util
import random
from pathlib import Path

import pytest


@pytest.mark.slow
def test_files_that_come_in_are_read_or_refused(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("fuzz", Path(__file__).with_name("fuzz.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    came = module.fuzz(
        2000, random.SystemRandom().randrange(10**6), tmp_path
    )  # other ones each time; a failure names it
    assert all(outcomes for outcomes in came.values())
    assert came["a_checkpoint"]["refused"] > came["a_checkpoint"]["read"]
